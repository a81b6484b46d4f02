"""Words in names of columns that suggest the content, such as ``user`` or ``price``."""

from __future__ import annotations

import re

TIMES = {
    "time", "timestamp", "ts", "date", "datetime", "when", "created", "at", "hour", "day", "dt", "dat", "datum", "zeit",
    "fecha", "data", "jour", "sent", "occurred", "posted", "t",
}  # fmt: skip
# Words for steps of a calendar, which number days or hours instead of counting seconds.
CALENDAR = {"hour", "day", "date"}
# Words for times that are usually a property of a user or an item.
ATTRIBUTES = {
    "registration", "registered", "register", "signup", "signed", "join", "joined", "enrolled", "release", "released",
    "publish", "published", "publication", "publishtime", "upload", "uploaded", "install", "installed", "launch",
    "launched", "expiration", "expires", "expiry", "birth",
}  # fmt: skip
# Words for birth dates, which are not times of events.
BIRTHS = {"birth", "birthday", "birthdate", "born", "dob"}
# Words for users, in order of preference.
USERS = (
    "user", "uid", "customer", "visitor", "member", "client", "reader", "viewer", "reviewer", "account", "subscriber",
    "buyer", "player", "listener", "learner", "household", "shopper", "consumer", "msno", "person", "kunde", "nutzer",
    "usuario", "cliente", "utilisateur", "profile", "profilename", "uuid", "email",
)  # fmt: skip
SESSIONS = (
    "session", "sid", "visit", "search", "srch", "query", "slate", "impression", "request", "display", "order",
    "basket", "invoice", "auction",
)  # fmt: skip
# Words for the split of a row, and the values of such columns.
SPLIT_WORDS = {
    "split",
    "subset",
    "partition",
    "set",
    "dataset",
    "phase",
    "usage",
    "fold",
    "train",
    "valid",
    "test",
}
SPLIT_VALUES = {
    **dict.fromkeys(("train", "training", "learn", "tr"), "train"),
    **dict.fromkeys(("valid", "validation", "validate", "val", "dev", "eval"), "valid"),
    **dict.fromkeys(("test", "testing", "holdout"), "test"),
}
# Words for items, in order of preference.
ITEMS = (
    "item", "product", "article", "ad", "adgroup", "offer", "coupon", "movie", "song", "track", "video", "hotel", "sku",
    "news", "book", "game", "property", "prop", "venue", "place", "course", "podcast", "asin", "isbn", "creative",
    "listing", "business", "beer", "anime", "aid", "vid", "photo", "post", "doc", "document",
)  # fmt: skip
AMOUNTS = {
    "price", "age", "count", "num", "n", "amount", "qty", "quantity", "duration", "size", "length", "rate", "days",
    "seconds", "hours", "minutes", "views", "distance", "weight", "height", "width", "total", "cost", "bid", "step",
    "tenure", "income", "salary", "revenue", "balance", "fare", "gain", "loss", "percent", "ratio", "avg", "mean",
    "charges", "months", "years", "len", "ms", "secs",
}  # fmt: skip
CODES = {
    *ITEMS, "id", "ids", "ip", "app", "os", "channel", "device", "code", "key", "type", "kind", "category", "cat",
    "brand", "model", "version", "region", "city", "country", "state", "zip", "zipcode", "postcode", "store", "shop",
    "site", "page", "domain", "campaign", "advertiser", "publisher", "creative", "banner", "group", "cluster", "lang",
    "locale", "segment", "genre", "tag", "carrier", "browser", "language", "job", "occupation", "department", "aisle",
    "seller", "merchant", "author", "creator", "keyword", "topic", "hash", "c", "user",
}  # fmt: skip
EARLIER = {
    "history", "hist", "recent", "recently", "last", "previous", "prev", "past", "earlier", "sequence", "seq", "viewed",
}  # fmt: skip
# Words that the name of an id column may have in addition to the word for a user or session:
# user_key, but not user_age.
_ID_WORDS = {
    "id", "ids", "key", "hash", "hashed", "uuid", "guid", "code", "name", "idx", "index", "encoded", "encrypted", "src",
    "anonymous", "anonymized", "unique", "full", "x", "no", "nr",
}  # fmt: skip


def tokens(name: str) -> set[str]:
    """Return the words of a name, and the whole name, in lower case.

    For click_articleId, these are click, article, id and click_articleid.
    """
    return {*_parts(name), name.strip().lower()}


def names_a(name: str, word: str) -> bool:
    """Whether the name denotes an id of `word`, as user_session denotes one of session, and not a
    property of it.
    """
    parts = set(_parts(name))
    allowed = _ID_WORDS.union(USERS) if word in SESSIONS else _ID_WORDS
    return name.strip().lower() == word or (word in parts and parts - {word} <= allowed)


def names_amount(name: str) -> bool:
    """Whether the name suggests an amount, or is a plural, which counts something, such as
    episodes.
    """
    last = (_parts(name) or [""])[-1]
    is_plural = len(last) > 4 and last.endswith("s") and not last.endswith(("ss", "us", "is", "ies"))
    return bool(tokens(name) & AMOUNTS) or (is_plural and last not in {*ITEMS, *CODES, *USERS})


def is_code(name: str) -> bool:
    """Whether the name suggests ids or codes. Its last word decides, or any word if no word
    suggests an amount.
    """
    parts = _parts(name)
    if any(names_a(name, word) for word in USERS):
        return True
    return parts[-1:] in (["id"], ["ids"], ["code"], ["type"], ["key"], ["no"], ["nr"]) or (
        bool(tokens(name) & CODES) and not tokens(name) & AMOUNTS
    )


def _parts(name: str) -> list[str]:
    """Return the words of a name in order: of user_id:token, user and id. The part behind the colon
    is a type.
    """
    bare = re.sub(r":(token|float)(_seq)?$", "", name)
    parts = [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", bare)]
    return [word for part in parts for word in _split_id(part)]


def _split_id(part: str) -> list[str]:
    """Split words such as visitorid, itemids and userkey."""
    match = re.fullmatch(r"(.+?)(ids?|key|hash)", part)
    return [match[1], match[2]] if match and match[1] in _KEYS else [part]


_KEYS = {*USERS, *SESSIONS, *ITEMS}
