"""Words in names of columns, and what they suggest about the content."""

from __future__ import annotations

import re

TIMES = {"time", "timestamp", "ts", "date", "datetime", "when", "created", "at", "hour", "day", "dt"}
# Words for birth dates, which are not times of events.
BIRTHS = {"birth", "birthday", "birthdate", "born", "dob"}
# Words for users, in order of preference.
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
# Words that the name of an id column may have in addition to the word for a user or session: user_key, but not
# user_age.
_ID_WORDS = {
    "id", "ids", "key", "hash", "hashed", "uuid", "guid", "code", "name", "idx", "index", "encoded", "encrypted", "src",
    "anonymous", "anonymized", "unique", "full", "x",
}  # fmt: skip


def tokens(name: str) -> set[str]:
    """Return the words of a name, and the whole name, in lower case.

    For click_articleId, these are click, article, id and click_articleid.
    """
    return {*_parts(name), name.strip().lower()}


def names_a(name: str, word: str) -> bool:
    """Whether the name denotes an id of `word`, as user_session denotes one of session, and not a property of it."""
    parts = set(_parts(name))
    allowed = _ID_WORDS.union(USERS) if word in SESSIONS else _ID_WORDS
    return name.strip().lower() == word or (word in parts and parts - {word} <= allowed)


def is_code(name: str) -> bool:
    """Whether the name suggests ids or codes. Its last word decides, or any word if no word suggests an amount."""
    parts = _parts(name)
    return parts[-1:] in (["id"], ["ids"], ["code"], ["type"], ["key"]) or (
        bool(tokens(name) & CODES) and not tokens(name) & AMOUNTS
    )


def _parts(name: str) -> list[str]:
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)]
