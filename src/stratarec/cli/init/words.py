"""What the words of a column's name say of what is in it."""

from __future__ import annotations

import re

TIMES = {"time", "timestamp", "ts", "date", "datetime", "when", "created", "at", "hour", "day", "dt"}
# Dates of people, not of events.
BIRTHS = {"birth", "birthday", "birthdate", "born", "dob"}
# The likelier ones first.
USERS = (
    "user", "userid", "uid", "customer", "customerid", "visitor", "member", "client", "reader", "viewer", "reviewer",
    "account", "subscriber", "buyer", "player",
)  # fmt: skip
SESSIONS = ("session", "sessionid", "sid", "visit", "search", "query", "slate", "impression", "request")
ITEMS = {
    "item", "itemid", "product", "article", "ad", "movie", "song", "track", "video", "hotel", "sku", "news",
    "coupon", "offer", "book", "game",
}  # fmt: skip
AMOUNTS = {
    "price", "age", "count", "num", "n", "amount", "qty", "quantity", "duration", "size", "length", "rate", "days",
    "seconds", "hours", "minutes", "views", "distance", "weight", "height", "width", "total", "cost", "bid", "step",
    "tenure", "income", "salary", "revenue", "balance", "fare", "gain", "loss", "percent", "ratio", "avg", "mean",
    "charges", "months", "years",
}  # fmt: skip
CODES = {
    *ITEMS, "id", "ids", "ip", "app", "os", "channel", "device", "code", "key", "type", "kind", "category", "cat",
    "brand", "model", "version", "region", "city", "country", "state", "zip", "zipcode", "postcode", "store", "shop",
    "site", "page", "domain", "campaign", "advertiser", "publisher", "creative", "banner", "group", "cluster",
    "segment", "genre", "tag", "carrier", "browser", "language", "job", "occupation", "department", "aisle", "seller",
    "merchant", "author", "creator", "keyword", "topic", "hash", "c", "user", "userid",
}  # fmt: skip
EARLIER = {
    "history", "hist", "recent", "recently", "last", "previous", "prev", "past", "earlier", "sequence", "seq", "viewed",
}  # fmt: skip
# What may stand beside the word for a user or session in the name of a column that names one: user_age does not.
_BESIDE = {
    "id", "ids", "key", "hash", "hashed", "uuid", "guid", "code", "name", "idx", "index", "encoded", "encrypted", "src",
    "anonymous", "anonymized", "unique", "full", "x",
}  # fmt: skip


def tokens(name: str) -> set[str]:
    """Words of a name: click_articleId is click, article, id, and click_articleid."""
    return {*_parts(name), name.strip().lower()}


def names_a(name: str, word: str) -> bool:
    """Whether a column of that name holds who or what `word` is, and not something about it: user_session is one."""
    parts = set(_parts(name))
    beside = _BESIDE.union(USERS) if word in SESSIONS else _BESIDE
    return name.strip().lower() == word or (word in parts and parts - {word} <= beside)


def is_code(name: str) -> bool:
    """Whether numbers are names of something: by the last word of a name, or by any where none is of an amount."""
    parts = _parts(name)
    return parts[-1:] in (["id"], ["ids"], ["code"], ["type"], ["key"]) or (
        bool(tokens(name) & CODES) and not tokens(name) & AMOUNTS
    )


def _parts(name: str) -> list[str]:
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)]
