"""Logs in the shape of public logs, with the role that the owner of the log gives to each column.

The roles were written before `init` read the logs. If `init` reads one wrongly, change `init`, not
the role.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from cli.logs.made_up import (
    Generator,
    Log,
    World,
    amount,
    codes,
    counts,
    each,
    earlier,
    elapsed,
    fixed,
    ids,
    missing,
    normal,
    numbered,
    only,
    outcome,
    pick,
    random_key,
    rising,
    since_1970,
    some_of,
    stars,
    trait,
    uuid,
    vector,
    when,
    whole,
    words,
    written,
)

GENRES = ["Action", "Comedy", "Drama", "Sci-Fi", "Children's", "Film-Noir", "Romance", "War"]
COUNTRIES = ["DE", "US", "FR", "BR", "IN", "JP", "GB"]
BROWSERS = ["Chrome", "Safari", "Firefox", "Edge", "Opera"]
YES, FEATURE = ("yes", "no"), "number|category"
"""Small whole numbers and flags can be numbers or categories."""


def german(value: float) -> str:
    return f"{value:,.2f}".translate(str.maketrans(",.", ".,"))


GERMAN_MONTHS = ["Januar", "Februar", "März", "April", "Mai", "Juni", "Juli", "August", "September", "Oktober",
                 "November", "Dezember"]  # fmt: skip


def datetimes(world: World) -> list[datetime]:
    return [datetime(1970, 1, 1) + timedelta(seconds=int(x)) for x in world.time]


def german_dates(world: World) -> list[str]:
    return [f"{day.day}. {GERMAN_MONTHS[day.month - 1]} {day.year}" for day in datetimes(world)]


def one_odd(stamp: int) -> Generator:
    """Return times since 1970 of which one is `stamp`."""
    return lambda world: [stamp if row == 7 else int(x) for row, x in enumerate(world.time)]


MOVIES = [
    Log(name="MovieLens 100k u.data", file="u.data", separator="\t", header=False, order="random",
        start="1997-09-20", days=210, columns={
            "user id": ("category", ids("user")), "item id": ("category", ids("item")),
            "rating": ("label", stars(1, 2, 3, 4, 5)), "timestamp": ("time", since_1970())},
        label="column_3"),
    Log(name="MovieLens latest", file="ratings.csv", order="user", start="2009-01-01", days=3000, columns={
        "userId": ("user", ids("user")), "movieId": ("item", ids("item")),
        "rating": ("label", stars(0.5, 1.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)),
            "timestamp": ("time", since_1970())}),
    Log(name="MovieLens joined", file="joined.csv", order="user", start="2015-01-01", days=900, columns={
        "userId": ("user", ids("user")), "movieId": ("item", ids("item")),
        "title": ("category|list", each(ids("item"), lambda x: f"Story {x} ({1970 + x % 50})")),
        "genres": ("list", some_of(GENRES, "|", key="item")), "gender": ("category", trait("user", "FM")),
        "age": (FEATURE, trait("user", [1, 18, 25, 35, 45, 50, 56])),
        "occupation": ("category", trait("user", range(21))),
        "zip_code": ("category", each(ids("user"), lambda x: f"{x % 99999:05d}")),
        "release_date": ("out|category", each(ids("item"), lambda x: f"{1 + x % 28:02d}-Jan-{1970 + x % 29}")),
        "rating": ("label", stars(1, 2, 3, 4, 5)), "timestamp": ("time", since_1970())}),
    Log(name="Netflix prize", file="netflix.csv", order="random", start="2000-01-01", days=2100, columns={
        "movie_id": ("item", ids("item", low=1, high=17770)),
            "customer_id": ("user", ids("user", low=6, high=2649429)),
        "rating": ("label", stars(1, 2, 3, 4, 5)), "date": ("time", when("%Y-%m-%d"))}),
    Log(name="RecBole ml-100k", file="ml.inter", separator="\t", order="random", columns={
        "user_id:token": ("user", ids("user")), "item_id:token": ("item", ids("item")),
        "rating:float": ("label", stars(1, 2, 3, 4, 5)), "timestamp:float": ("time", since_1970(kind=float))}),
    Log(name="RecBole with features", file="ks.inter", separator="\t", columns={
        "user_id:token": ("user", ids("user")), "video_id:token": ("item", ids("item")),
        "tags:token_seq": ("list", some_of(["fun", "news", "cat", "dog", "food"], " ", key="item")),
        "price:float": ("number", amount(20)), "label:float": ("label", outcome(1.0, 0.0)),
        "timestamp:float": ("time", since_1970(1000, float))}),
    Log(name="Anime ratings", file="anime.csv", order="user", columns={
        "user_id": ("user", ids("user")), "anime_id": ("item", ids("item")),
        "type": ("category", trait("item", ["TV", "OVA", "Movie"])),
            "episodes": ("number", trait("item", range(1, 300))),
        "members": ("number", trait("item", lambda r: int(10 ** r.uniform(2, 6)))),
        "genre": ("list", some_of(GENRES, ", ", key="item")),
            "rating": ("label", stars(-1, 5, 6, 7, 8, 9, 10))}),
    Log(name="Douban", file="douban.tsv", separator="\t", start="2010-01-01", days=1500, order="user", columns={
        "UserId": ("user", ids("user")), "MovieId": ("item", ids("item")),
            "Rating": ("label", stars(1, 2, 3, 4, 5)),
        "Timestamp": ("time", when("%Y-%m-%dT%H:%M:%S")), "Votes": ("number", counts(40))}),
]  # fmt: skip

ADS = [
    Log(name="Criteo display", file="criteo.csv", order="random", columns={
        "label": ("label", outcome()),
        **{f"I{x}": ("number", missing(counts(5 * x * x), 0.2)) for x in (1, 2, 4, 9)},
        **{f"C{x}": ("category", missing(codes(20 * x, form="{hex8}"), 0.1)) for x in (1, 2, 5, 9)}}),
    Log(name="Avazu", file="avazu.csv", start="2014-10-21", days=10, rate=0.17, columns={
        "id": ("out", each(random_key("{}"), lambda x: str(int(x) * 1000003 + 10**15))),
            "click": ("label", outcome()),
        "hour": ("time", when("%y%m%d%H")), "C1": ("category", pick([1005, 1002, 1010])),
        "banner_pos": (FEATURE, pick([0, 1])), "site_id": ("category", codes(80, form="{hex8}")),
        "app_category": ("category", codes(12, form="{hex8}")),
            "device_id": ("category", codes(300, form="{hex8}")),
        "device_type": (FEATURE, pick([0, 1, 4])), "C14": ("category", codes(120, 15000, 24000)),
        "C20": ("category", pick([-1, 100084, 100075, 100148]))}),
    Log(name="Taobao ads", file="raw_sample.csv", order="random", start="2017-05-06", days=8, rate=0.06,
        columns={
        "user": ("user", ids("user", high=1141729)), "time_stamp": ("time", since_1970()),
        "adgroup_id": ("item", ids("item", high=846811)),
            "pid": ("category", pick(["430548_1007", "430539_1007"])),
        "nonclk": ("leak", outcome(0, 1)), "clk": ("label", outcome())}, label="clk"),
    Log(name="Taobao ads joined", file="ads.csv", start="2017-05-06", days=8, columns={
        "userid": ("user", ids("user")), "adgroup_id": ("item", ids("item")),
        "cms_segid": ("category", trait("user", range(97))),
            "final_gender_code": ("category", trait("user", [1, 2])),
        "age_level": (FEATURE, trait("user", range(7))),
            "new_user_class_level ": (FEATURE, missing(trait("user", range(1, 5)), 0.2)),
        "cate_id": ("category", trait("item", range(4000, 4050))), "customer": ("category", codes(110)),
        "brand": ("category", missing(each(codes(100), lambda x: f"{x:.1f}"), 0.3)),
            "price": ("number", amount(90)),
        "time_stamp": ("time", when("%Y-%m-%d %H:%M:%S")), "clk": ("label", outcome())}),
    Log(name="iPinYou", file="ipinyou.tsv", separator="\t", start="2013-06-06", days=7, columns={
        "bidid": ("out", random_key("{hex32}")), "timestamp": ("time", when("%Y%m%d%H%M%S") ),
        "ipinyouid": ("user|category", ids("user", "{hex16}")),
            "useragent": ("category", codes(40, form="Mozilla/5.0 (Windows NT {}) like Gecko")),
        "IP": ("category", codes(400, form="118.{}.*")), "region": ("category", codes(30, 1, 400)),
            "adexchange": ("category", pick([1, 2, 3])),
        "slotwidth": (FEATURE, pick([300, 728, 160, 336])), "slotprice": ("number", pick(range(0, 300, 5))),
        "creative": ("item|category", ids("item", "{hex32}")), "bidprice": (FEATURE, pick([277, 294, 300])),
        "payingprice": ("number", whole(5, 290)),
            "usertag": ("list", some_of([10006, 10024, 10031, 13403, 16706], ",")),
        "click": ("label", outcome())}),
    Log(name="TalkingData", file="talking.csv", start="2017-11-06", days=4, rate=0.05, columns={
        "ip": ("category", codes(600)), "app": ("category", codes(100, 1, 700)),
            "device": ("category", codes(20, 1, 4000)),
        "os": ("category", codes(70, 0, 900)), "channel": ("category", codes(110, 0, 500)),
        "click_time": ("time", when("%Y-%m-%d %H:%M:%S")),
        "attributed_time": ("leak", only(when("%Y-%m-%d %H:%M:%S", 300))),
            "is_attributed": ("label", outcome())}),
    Log(name="Criteo attribution", file="attribution.tsv", separator="\t", columns={
        "timestamp": ("time", elapsed()), "uid": ("user", ids("user", high=28_000_000)),
        "campaign": ("category", codes(90, 10**6, 3 * 10**7)), "conversion": ("label", outcome()),
        "conversion_timestamp": ("leak", only(elapsed(), -1)), "conversion_id": ("leak", only(codes(900), -1)),
        "attribution": ("leak", only(fixed(1), 0, 0.6)), "cost": ("number", amount(1e-4, digits=8)),
        "cpo": ("leak|number", only(amount(0.2), 0.0)), "cat1": ("category", codes(9, 10**6, 3 * 10**7)),
        "cat2": ("category", codes(60, 10**6, 3 * 10**7))}, label="conversion"),
    Log(name="Criteo uplift", file="uplift.csv", order="random", columns={
        **{f"f{x}": ("number", normal(x, 1 + x, 6)) for x in range(4)},
            "treatment": (FEATURE, pick([1, 1, 1, 0])),
        "conversion": ("leak", only(fixed(1), 0, 0.3)), "visit": ("label", outcome()),
            "exposure": (FEATURE, pick([0, 0, 1]))},
        label="visit"),
    Log(name="Ali-CCP", file="aliccp.csv", order="random", columns={
        "click": ("label", outcome()), "purchase": ("leak", only(fixed(1), 0, 0.2)),
            "101": ("category", ids("user")),
        "121": ("category", trait("user", range(1, 90))), "205": ("category", ids("item")),
            "301": ("category", pick([1, 2, 3])),
        "508": ("category", codes(300)), "D109_14": ("number", normal(0.4, 0.1, 5))}, label="click"),
    Log(name="Outbrain clicks", file="outbrain.csv", rate=0.19, columns={
        "display_id": ("session", rising()), "ad_id": ("item", ids("item")), "clicked": ("label", outcome()),
        "uuid": ("user", ids("user", "{hex16}")), "document_id": ("category", codes(200)),
            "timestamp": ("time|number|out", elapsed()),
        "platform": ("category", pick([1, 2, 3])), "geo_location": ("category", codes(60, form="US>CA>{}"))}),
    Log(name="Avito context ads", file="avito.tsv", separator="\t", start="2015-04-25", days=26, rate=0.08,
        columns={
        "SearchID": ("session", rising(first=1000)), "AdID": ("item", ids("item")),
            "Position": (FEATURE, pick([1, 2, 6, 7, 8])),
        "ObjectType": ("category", pick([1, 2, 3])), "HistCTR": ("number", amount(0.01, digits=6)),
            "IsClick": ("label", outcome()),
        "SearchDate": ("time", when("%Y-%m-%d %H:%M:%S.0")), "IPID": ("category", codes(300)),
            "UserID": ("user", ids("user")),
        "IsUserLoggedOn": (FEATURE, trait("session", [0, 1])),
            "SearchQuery": ("category|list", missing(words(2, "session"), 0.4)),
        "CategoryID": ("category", codes(60))}),
    Log(name="KDD Cup 2012 track 2", file="kdd.tsv", separator="\t", order="random", columns={
        "Click": ("label", counts(0.3)), "Impression": ("number|weight", each(counts(1), lambda x: x + 1)),
            "DisplayURL": ("category", codes(90, 10**15, 10**18)),
        "AdID": ("item", ids("item", high=22_000_000)), "AdvertiserID": ("category", codes(60)),
            "Depth": (FEATURE, pick([1, 2, 3])),
        "Position": (FEATURE, pick([1, 2, 3])), "QueryID": ("category|session", codes(400)),
            "KeywordID": ("category", codes(200)),
        "UserID": ("user", ids("user", high=23_000_000))}),
    Log(name="Huawei ads", file="huawei.csv", separator="|", start="2022-06-03", days=7, columns={
        "label": ("label", outcome()), "user_id": ("user", ids("user")), "log_id": ("out", random_key("{}")),
        "age": (FEATURE, trait("user", range(2, 9))), "task_id": ("item|category", ids("item")),
            "adv_id": ("category", codes(150)),
        "pt_d": ("time", when("%Y%m%d%H%M")),
            "u_newsCatInterests": ("list", some_of(range(10, 200, 7), "^", key="user")),
        "u_refreshTimes": (FEATURE, pick(range(10)))}),
    Log(name="Tencent social ads", file="tencent.csv", days=13, columns={
        "label": ("label", outcome()), "clickTime": ("time|out", each(when("%d%H%M"), int)),
            "conversionTime": ("leak", only(each(when("%d%H%M"), int))),
        "creativeID": ("item|category", ids("item")), "userID": ("user", ids("user", high=2_800_000)),
            "positionID": ("category", codes(120)),
        "connectionType": ("category", pick(range(5))), "telecomsOperator": ("category", pick(range(4)))}),
    Log(name="DSP log in JSON lines", file="dsp.json", columns={
        "event_ts": ("time", since_1970(1000)),
            "auction_id": ("out|session", each(random_key("{}"), lambda x: uuid(int(x)))),
        "device_ifa": ("user|category", ids("user", uuid)),
            "app_bundle": ("category", codes(90, form="com.game.n{}")),
        "bid_floor": ("number", amount(0.8)), "country": ("category", pick(COUNTRIES)),
            "banner_sizes": ("list", some_of(["320x50", "300x250", "728x90"], None)),
        "clicked": ("label", each(outcome(), bool))}),
    Log(name="sampled negatives", file="sampled.csv", columns={
        "click": ("label", outcome()), "event_time": ("time", when("%Y-%m-%d %H:%M:%S")),
            "ad": ("item", ids("item")),
        "user": ("user", ids("user")), "weight": ("weight", outcome(1.0, 12.5)), "bid": ("number", amount(2))}),
]  # fmt: skip

SHOPS = [
    Log(name="RetailRocket", file="events.csv", start="2015-05-03", days=130, columns={
        "timestamp": ("time", since_1970(1000)), "visitorid": ("user", ids("user", high=1_400_000)),
        "event": ("label", outcome("transaction", "view")), "itemid": ("item", ids("item", high=460_000)),
        "transactionid": ("leak", only(codes(400)))}, label="event=transaction"),
    Log(name="Taobao UserBehavior", file="UserBehavior.csv", header=False, order="user", start="2017-11-24",
        days=9, columns={
        "u": ("category", ids("user")), "i": ("category", ids("item")), "c": ("category", codes(80)),
        "b": ("label", outcome("buy", "pv")), "t": ("time", since_1970())}, label="column_4=buy"),
    Log(name="Yoochoose clicks", file="yoochoose.csv", start="2014-04-01", days=180, columns={
        "SessionId": ("session", rising()),
            "Timestamp": ("time", each(when("%Y-%m-%dT%H:%M:%S."), lambda x: f"{x}{x[-2]}57Z")),
        "ItemId": ("item", ids("item", low=214500000, high=214900000)),
            "Category": ("category", pick(["0", "S", "1", "2", "3"])),
        "bought": ("label", outcome())}),
    Log(name="Diginetica", file="diginetica.csv", separator=";", start="2016-01-01", days=150, columns={
        "sessionId": ("session", rising()), "userId": ("user", missing(ids("user"), 0.7, "NA")),
            "itemId": ("item", ids("item")),
        "timeframe": ("number", whole(0, 900_000)), "eventdate": ("time", when("%Y-%m-%d")),
            "is_purchased": ("label", outcome())}),
    Log(name="Otto", file="otto.parquet", start="2022-07-31", days=28, columns={
        "session": ("session", rising()), "aid": ("item|category", ids("item", high=1_855_602)),
            "ts": ("time", since_1970(1000)),
        "type": ("label", outcome("orders", "clicks"))}, label="type=orders"),
    Log(name="H&M", file="hm.csv", start="2020-08-01", days=50, columns={
        "t_dat": ("time", when("%Y-%m-%d")), "customer_id": ("user", ids("user", "{hex64}")),
            "article_id": ("item", ids("item", "0{:09d}")),
        "price": ("number", amount(0.03, digits=8)), "sales_channel_id": ("category", pick([1, 2])),
            "age": ("number", missing(trait("user", range(16, 90)), 0.02)),
        "club_member_status": ("category", trait("user", ["ACTIVE", "PRE-CREATE", "LEFT CLUB"])),
            "label": ("label", outcome())}),
    Log(name="Instacart", file="instacart.csv", order="user", columns={
        "order_id": ("session", rising()), "product_id": ("item", ids("item")),
            "add_to_cart_order": ("number", whole(1, 60)),
        "reordered": ("label", outcome()), "user_id": ("user", ids("user")),
            "order_number": ("number|category", trait("session", range(1, 99))),
        "order_dow": (FEATURE, trait("session", range(7))),
            "order_hour_of_day": (FEATURE, trait("session", range(24))),
        "days_since_prior_order": ("number|category",
            missing(trait("session", [float(x) for x in range(31)]), 0.1)),
        "aisle_id": ("category", trait("item", range(1, 135))),
            "department_id": ("category", trait("item", range(1, 22)))}),
    Log(name="Dunnhumby coupons", file="dunnhumby.csv", order="user", columns={
        "household_key": ("user", ids("user")),
            "BASKET_ID": ("session|out", each(rising(), lambda x: 26984850000 + x * 31)),
            "DAY": ("time|out|number", elapsed(86_400)),
        "PRODUCT_ID": ("item", ids("item")), "QUANTITY": (FEATURE, pick([1, 1, 1, 2, 3])),
            "SALES_VALUE": ("number", amount(3)),
        "STORE_ID": ("category", codes(80)), "RETAIL_DISC": ("number", each(amount(0.5), lambda x: -x)),
            "TRANS_TIME": ("number|category|out", whole(0, 2359)),
        "redeemed": ("label", outcome())}),
    Log(name="UCI online retail", file="retail.csv", start="2010-12-01", days=370, encoding="utf-8", columns={
        "InvoiceNo": ("session|out|category", each(rising(), lambda x: 536365 + x)),
            "StockCode": ("item|category", ids("item", "{}A")),
        "Description": ("category|list", words(4, "item")),
            "Quantity": ("number", each(counts(6), lambda x: x + 1)),
        "InvoiceDate": ("time", each(when("%m/%d/%Y %H:%M"),
                lambda x: f"{int(x[:2])}/{int(x[3:5])}/{x[6:11]}{int(x[11:13])}{x[13:]}")),
        "UnitPrice": ("number", amount(3)), "CustomerID": ("user", each(ids("user"), lambda x: f"{x}.0")),
            "Country": ("category", trait("user", COUNTRIES)),
        "returned": ("label", outcome())}),
    Log(name="Olist orders", file="olist.csv", start="2017-01-01", days=500, order="random", columns={
        "order_id": ("out", random_key("{hex32}")), "customer_id": ("out|user|category", random_key("{hex32}")),
            "customer_unique_id": ("user", ids("user", "{hex32}")),
        "order_purchase_timestamp": ("time", when("%Y-%m-%d %H:%M:%S")),
            "order_delivered_carrier_date": ("out", when("%Y-%m-%d %H:%M:%S", 90_000)),
        "product_id": ("item", ids("item", "{hex32}")), "price": ("number", amount(80)),
            "freight_value": ("number", amount(15)),
        "seller_zip_code_prefix": ("category", codes(90, form="{:05d}")),
            "review_score": ("label", stars(1, 2, 3, 4, 5))}),
    Log(name="Tmall repeat buyers", file="tmall.csv", order="random", columns={
        "user_id": ("user", ids("user")), "merchant_id": ("item|category", ids("item", high=5000)),
            "age_range": (FEATURE, missing(trait("user", range(9)), 0.1)),
        "gender": ("category|number", trait("user", [0, 1, 2])), "label": ("label", outcome())}),
    Log(name="Rossmann-like German shop", file="shop.csv", separator=";", encoding="utf-8", start="2021-02-01",
        days=200, columns={
        "Datum": ("time", when("%d.%m.%Y %H:%M")), "Kunde": ("user|category", ids("user", "K{:06d}")),
            "Artikel": ("item|category", ids("item")),
        "Preis": ("number|out", each(amount(700), german)), "Bezeichnung": ("category|list", words(3, "item")),
            "gekauft": ("label", outcome("ja", "nein"))},
        label="gekauft=ja"),
    Log(name="French shop", file="boutique.csv", separator=";", quoted=True, start="2021-02-01", days=200,
        columns={
        "date_commande": ("time", when("%d/%m/%Y")), "client": ("user", ids("user")),
            "produit": ("item|category", ids("item")),
            "prix": ("number|out", each(amount(12), lambda x: f"{x:.2f}".replace(".", ","))),
        "région": ("category", trait("user", ["Île-de-France", "Occitanie", "Grand Est"])),
            "achat": ("label", outcome("oui", "non"))}, label="achat=oui"),
    Log(name="eCommerce events REES46", file="rees46.csv", start="2019-10-01", days=31, columns={
        "event_time": ("time", when("%Y-%m-%d %H:%M:%S UTC")),
            "event_type": ("label", outcome("purchase", "view")),
            "product_id": ("item", ids("item", low=1000000, high=60000000)),
        "category_id": ("category", trait("item", [2053013555631882655 + 977 * x for x in range(60)])),
            "category_code": ("category|list",
            missing(trait("item", ["electronics.smartphone", "appliances.kitchen.washer",
                "computers.notebook"]), 0.3)),
        "brand": ("category", missing(trait("item", ["samsung", "apple", "xiaomi", "lg"]), 0.2)),
            "price": ("number", amount(200)), "user_id": ("user", ids("user", low=500000000, high=590000000)),
        "user_session": ("session", each(rising(), uuid))}, label="event_type=purchase"),
    Log(name="Alibaba coupon O2O", file="o2o.csv", start="2016-01-01", days=160, columns={
        "User_id": ("user", ids("user", high=7_000_000)), "Merchant_id": ("category", codes(90)),
            "Coupon_id": ("item", ids("item")),
            "Discount_rate": ("category", pick(["150:20", "20:1", "200:20", "0.95"])),
        "Distance": (FEATURE, missing(pick(range(11)), 0.1, "null")), "Date_received": ("time", when("%Y%m%d")),
            "Date": ("leak", only(when("%Y%m%d", 90_000), "null")), "used": ("label", outcome())}),
    Log(name="Shopify export", file="shopify.csv", start="2023-03-01", days=90, columns={
        "Name": ("session|category|out", each(rising(), lambda x: f"#{1000 + x}")),
            "Email": ("user|category", ids("user", "user{}@example.com")),
            "Created at": ("time", when("%Y-%m-%d %H:%M:%S +0200")),
        "Paid at": ("leak", only(when("%Y-%m-%d %H:%M:%S +0200", 60))),
            "Lineitem sku": ("item", ids("item", "SKU-{}")), "Lineitem price": ("number", amount(30)),
            "Accepts Marketing": ("category|number", trait("user", YES)),
        "Refunded": ("label", outcome("yes", "no"))}, label="Refunded=yes"),
    Log(name="Amazon reviews 5-core", file="amazon.json.gz", order="random", start="2012-01-01", days=900,
        columns={
        "overall": ("label", stars(1.0, 2.0, 3.0, 4.0, 5.0)),
            "verified": ("category|number", each(pick([1, 1, 0]), bool)),
            "reviewTime": ("out|time", when("%m %d, %Y")),
        "reviewerID": ("user", ids("user", "A{:013d}")), "asin": ("item|category", ids("item", "B{:09d}")),
            "reviewText": ("out", words(40)), "summary": ("out|category|list", words(3)),
        "unixReviewTime": ("time", each(since_1970(), lambda x: x // 86400 * 86400))}, label="overall"),
    Log(name="Amazon reviews 2023", file="amazon23.jsonl", order="user", start="2018-01-01", days=900, columns={
        "rating": ("label", stars(1.0, 2.0, 3.0, 4.0, 5.0)), "title": ("out|category|list", words(3)),
            "text": ("out", words(40)), "asin": ("category|item", ids("item", "B{:09d}")),
            "parent_asin": ("category|item", codes(90, form="B{:09d}")),
        "user_id": ("user", ids("user", "A{hex16}")), "timestamp": ("time", since_1970(1000)),
            "verified_purchase": ("category|number", each(pick([1, 0]), bool)),
            "helpful_vote": ("number|leak", counts(3))}, label="rating"),
    Log(name="Amazon ratings only", file="ratings_Beauty.csv", header=False, order="user", columns={
        "u": ("category", ids("user", "A{:012d}X")), "i": ("category", ids("item", "B{:09d}")),
            "r": ("label", stars(1.0, 2.0, 3.0, 4.0, 5.0)),
            "t": ("time", each(since_1970(), lambda x: x // 86400 * 86400))}, label="column_3"),
]  # fmt: skip

MEDIA = [
    Log(name="MIND impressions", file="mind.tsv", separator="\t", start="2019-11-09", days=6, columns={
        "impression_id": ("session", rising()), "user_id": ("user", ids("user", "U{}")),
            "time": ("time", when("%m/%d/%Y %I:%M:%S %p")),
        "history": ("list", earlier(ids("item", "N{}"))), "news_id": ("item", ids("item", "N{}")),
            "category": ("category", trait("item", ["news", "sports", "finance"])),
            "clicked": ("label", outcome())}),
    Log(name="Adressa", file="adressa.json", start="2017-01-01", days=7, columns={
        "eventId": ("out", numbered(1_000_000)), "time": ("time", since_1970()),
            "userId": ("user", ids("user", "cx:{hex16}")), "id": ("item|category", ids("item", "{hex40}")),
            "title": ("category|list", words(5, "item")),
        "category1": ("category|list", trait("item", ["nyheter|innenriks", "sport|fotball", "100sport"])),
            "publishtime": ("out", trait("item",
                lambda r: written(1483228800 - int(r.integers(0, 10**7)), "%Y-%m-%dT%H:%M:%S.000Z"))),
        "activeTime": ("number", whole(1, 900)),
            "deviceType": ("category", pick(["Desktop", "Mobile", "Tablet"])),
            "read": ("label", each(outcome(), bool))}, label="read"),
    Log(name="Globo", file="globo.csv", start="2017-10-01", days=16, columns={
        "user_id": ("user", ids("user")),
            "session_id": ("session", each(rising(), lambda x: 150682500000000 + x)),
            "session_start": ("out|time", each(since_1970(1000), lambda x: x // 10**7 * 10**7)),
            "session_size": (FEATURE, trait("session", range(2, 20))),
        "click_article_id": ("item", ids("item")), "click_timestamp": ("time", since_1970(1000)),
            "click_environment": ("category", pick([1, 2, 4])),
            "click_deviceGroup": ("category", pick([1, 3, 4])), "click_os": ("category", pick([2, 12, 17, 20])),
        "label": ("label", outcome())}),
    Log(name="Last.fm 1K", file="lastfm.tsv", separator="\t", order="user", start="2006-05-01", days=900,
        columns={
        "userid": ("user", ids("user", "user_{:06d}")), "timestamp": ("time", when("%Y-%m-%dT%H:%M:%SZ")),
            "musicbrainz-artist-id": ("category", missing(codes(80, form="{hex32}"), 0.1)),
            "artist-name": ("category", codes(80, form="Band {}")),
        "track-name": ("item|category", ids("item", "Song {}")), "skipped": ("label", outcome())}),
    Log(name="KKBox", file="kkbox.csv", order="random", columns={
        "msno": ("user|category", ids("user", "{hex32}Q=")), "song_id": ("item", ids("item", "{hex32}Y=")),
            "source_system_tab": ("category", pick(["my library", "explore", "search", "radio"])),
        "source_type": ("category", missing(pick(["local-library", "online-playlist", "album"]), 0.05)),
            "city": ("category", trait("user", [1, 4, 5, 13, 15, 22])),
            "bd": ("number|category", trait("user", [0, *range(14, 70)])),
        "registered_via": ("category", trait("user", [3, 4, 7, 9])),
            "registration_init_time": ("out",
            trait("user", lambda r: f"20{r.integers(10, 17)}{r.integers(1, 13):02d}{r.integers(1, 29):02d}")),
        "expiration_date": ("out", trait("user",
                lambda r: f"2017{r.integers(1, 13):02d}{r.integers(1, 29):02d}")),
            "song_length": ("number", trait("item", lambda r: int(r.integers(10**5, 5 * 10**5)))),
            "genre_ids": ("list", some_of([465, 458, 921, 1609], "|", 3, "item")),
            "target": ("label", outcome())}),
    Log(name="KuaiRec", file="kuairec.csv", order="user", start="2020-07-05", days=60, columns={
        "user_id": ("user", ids("user", high=7176)), "video_id": ("item", ids("item", high=10728)),
            "play_duration": ("number", amount(9000, digits=0)),
            "video_duration": ("number", trait("item", lambda r: int(r.integers(3000, 60000)))),
        "time": ("out|time", when("%Y-%m-%d %H:%M:%S.083")), "date": ("out|time", when("%Y%m%d")),
            "timestamp": ("time|out", each(since_1970(), lambda x: x + 0.083)),
            "watch_ratio": ("number|leak", amount(0.8, digits=4)), "liked": ("label", outcome())}),
    Log(name="KuaiRand", file="kuairand.csv", start="2022-04-08", days=30, columns={
        "user_id": ("user", ids("user")), "video_id": ("item", ids("item", high=4_000_000)),
            "date": ("out", when("%Y%m%d")),
            "hourmin": (FEATURE, each(when("%H%M"), lambda x: int(x) // 100 * 100)),
            "time_ms": ("time", since_1970(1000)),
        "is_click": ("label", outcome()), "is_like": ("leak", only(fixed(1), 0, 0.2)),
            "long_view": ("leak", only(fixed(1), 0, 0.5)),
            "play_time_ms": ("leak|number", only(amount(20000, digits=0), 0)),
            "duration_ms": ("number", trait("item", lambda r: int(r.integers(5000, 90000)))),
            "tab": ("category", pick(range(8)))},
        label="is_click"),
    Log(name="Tenrec", file="tenrec.csv", order="random", columns={
        "user_id": ("user", ids("user")), "item_id": ("item", ids("item")), "click": ("label", outcome()),
            "follow": ("leak", only(fixed(1), 0, 0.1)), "like": ("leak", only(fixed(1), 0, 0.2)),
            "share": ("leak", only(fixed(1), 0, 0.1)),
        "video_category": ("category|number", pick([0, 1])), "watching_times": ("number", counts(2)),
            "gender": ("category|number", trait("user", [0, 1, 2])), "age": (FEATURE, trait("user", range(8))),
            "hist_1": ("category", ids("item")), "hist_2": ("category", ids("item"))},
        label="click"),
    Log(name="Spotify skips", file="spotify.csv", start="2018-07-15", days=60, columns={
        "session_id": ("session", each(rising(), lambda x: f"0_{uuid(x)}")),
            "session_position": ("number|category", whole(1, 20)),
            "session_length": ("number|category", trait("session", range(10, 21))),
            "track_id_clean": ("item|category", ids("item", lambda x: f"t_{uuid(x)}")),
        "skip_1": ("label", outcome("true", "false")),
            "hist_user_behavior_n_seekfwd": ("number|category", counts(0.2)),
            "hour_of_day": (FEATURE, trait("session", range(24))), "date": ("time", when("%Y-%m-%d")),
            "premium": ("category|number", trait("session", ["true", "false"])),
        "context_type": ("category", pick(["editorial_playlist", "user_collection", "radio"]))},
            label="skip_1"),
    Log(name="Steam reviews", file="steam.jsonl", order="random", start="2014-01-01", days=700, columns={
        "user_id": ("user", ids("user", "7656{:011d}")), "item_id": ("item", ids("item", "{}")),
            "recommend": ("label", each(outcome(), bool)), "playtime_forever": ("number", counts(900)),
            "review": ("out", words(30)), "funny": ("category|out|list",
                pick(["", "2 people found this review funny", "1 person found this review funny"])),
        "posted": ("time", when("Posted %B %d, %Y."))}, label="recommend"),
    Log(name="Goodreads", file="goodreads.json.gz", order="user", start="2011-01-01", days=1500, columns={
        "user_id": ("user", ids("user", "{hex32}")), "book_id": ("item", ids("item", "{}")),
            "review_id": ("out", random_key("{hex32}")),
            "isRead": ("category|number", each(pick([1, 1, 0]), bool)),
            "rating": ("label", stars(0, 2, 3, 4, 5)),
        "date_added": ("time", when("%a %b %d %H:%M:%S -0700 %Y")),
            "read_at": ("out", missing(when("%a %b %d %H:%M:%S -0700 %Y", 500_000), 0.3))}, label="rating"),
    Log(name="Book-Crossing", file="bx.csv", separator=";", quoted=True, order="random", columns={
        "User-ID": ("user", ids("user")), "ISBN": ("item|category", ids("item", "0{:08d}X")),
            "Book-Rating": ("label", stars(0, 0, 0, 5, 7, 8, 10)),
            "Location": ("category|list", trait("user",
                ["berlin, berlin, germany", "lyon, rhone, france", "austin, texas, usa"])),
            "Age": ("number", missing(trait("user", range(8, 80)), 0.3, "NULL")),
        "Year-Of-Publication": ("number|category", trait("item", range(1960, 2005)))}),
    Log(name="BeerAdvocate", file="beer.csv", order="random", start="2004-01-01", days=2500, columns={
        "brewery_id": ("category", codes(80)), "review_time": ("time", since_1970()),
            "review_overall": ("label", stars(1.0, 2.5, 3.0, 3.5, 4.0, 5.0)),
            "review_profilename": ("user", ids("user", "drinker{}")),
            "beer_style": ("category", trait("item", ["IPA", "Stout", "Lager"])),
            "beer_abv": ("number", trait("item", [4.5, 5.0, 7.2, 9.1])), "beer_beerid": ("item", ids("item"))},
        label="review_overall"),
    Log(name="Epinions", file="epinions.txt", separator=" ", header=False, order="random", columns={
        "u": ("category", ids("user")), "i": ("category", ids("item")), "r": ("label", stars(1, 2, 3, 4, 5))},
            label="column_3"),
    Log(name="Yelp reviews", file="yelp.json", order="random", start="2012-01-01", days=2000, columns={
        "review_id": ("out", random_key("{hex16}")), "user_id": ("user", ids("user", "{hex16}")),
            "business_id": ("item|category", ids("item", "{hex16}")),
            "stars": ("label", stars(1.0, 2.0, 3.0, 4.0, 5.0)), "useful": ("number|leak", counts(1)),
            "funny": ("number|leak|category", counts(0.5)), "text": ("out", words(40)),
            "date": ("time", when("%Y-%m-%d %H:%M:%S"))},
        label="stars"),
    Log(name="news portal with HTTP dates", file="portal.csv", days=14, columns={
        "when": ("time", when("%a, %d %b %Y %H:%M:%S GMT")), "reader": ("user", ids("user")),
            "article": ("item", ids("item")),
            "section": ("category", trait("item", ["home", "world", "sport"])), "label": ("label", outcome())}),
    Log(name="Podcasts with followers", file="podcasts.csv", order="random", columns={
        "listener_id": ("user", ids("user")), "podcast": ("item|category", ids("item", "pod-{}")),
            "followers": ("number", trait("item", lambda r: int(10 ** r.uniform(3, 9.2)))),
            "file_bytes": ("number", amount(5e7, 1.5, 0)), "duration": ("number", amount(1800, digits=0)),
            "label": ("label", outcome())}),
]  # fmt: skip

TRAVEL = [
    Log(name="Expedia hotel ranking", file="expedia.csv", order="random", start="2013-01-01", days=180,
        rate=0.1, columns={
        "srch_id": ("session", rising()), "date_time": ("time", when("%Y-%m-%d %H:%M:%S")),
            "site_id": ("category", pick([5, 14, 15, 24, 32])),
            "visitor_hist_adr_usd": ("number", missing(amount(120), 0.9, "NULL")),
            "prop_id": ("item|category", ids("item", high=140_000)),
            "prop_starrating": (FEATURE, trait("item", range(6))),
            "prop_location_score1": ("number", amount(2)),
        "position": ("number", whole(1, 40)), "price_usd": ("number", amount(140)),
            "promotion_flag": (FEATURE, pick([0, 1])),
            "comp1_rate": (FEATURE, missing(pick([0, -1, 1]), 0.9, "NULL")), "click_bool": ("label", outcome()),
            "gross_bookings_usd": ("leak", only(amount(300), "NULL", 0.6)),
            "booking_bool": ("leak", only(fixed(1), 0, 0.6))}, label="click_bool"),
    Log(name="Trivago RecSys 2019", file="trivago.csv", start="2018-11-01", days=7, columns={
        "user_id": ("user", ids("user", "{hex16}")),
            "session_id": ("session", each(rising(), lambda x: f"s{x * 7919 % 99991:x}")),
            "timestamp": ("time", since_1970()), "step": ("number|category", whole(1, 90)),
            "action_type": ("label", outcome("clickout item", "interaction item image")),
            "reference": ("item|category", ids("item", "{}")),
            "platform": ("category", trait("user", COUNTRIES)),
        "city": ("category", trait("session", ["Berlin, Germany", "Rome, Italy", "Paris, France"])),
            "device": ("category", trait("session", ["mobile", "desktop", "tablet"])),
            "current_filters": ("list", missing(some_of(["Sort by Price", "Breakfast", "Pool"], "|"), 0.7)),
            "impressions": ("list", missing(some_of(range(1000, 1900, 17), "|", 12, least=3), 0.4))},
            label="action_type=clickout item"),
    Log(name="Hotel bookings", file="hotel.csv", order="random", start="2015-07-01", days=790, columns={
        "hotel": ("category", pick(["Resort Hotel", "City Hotel"])), "is_canceled": ("label", outcome()),
            "lead_time": ("number", counts(90)), "arrival_date_year": (FEATURE, each(when("%Y"), int)),
            "arrival_date_month": ("category", when("%B")),
            "arrival_date_week_number": ("number|category", each(when("%W"), int)),
            "adr": ("number", amount(100)), "agent": ("category", missing(codes(90, 1, 500), 0.15, "NULL")),
        "country": ("category", pick(["PRT", "GBR", "FRA"])),
            "reservation_status": ("leak", outcome("Canceled", "Check-Out")),
            "reservation_status_date": ("time|out", when("%Y-%m-%d"))}, label="is_canceled"),
    Log(name="hotel reservations with 29/2/2018", file="reservations.csv", order="random", start="2017-07-01",
        days=540, columns={
        "Booking_ID": ("out", numbered(1, "INN{:05d}")), "no_of_adults": (FEATURE, pick([1, 2, 3])),
            "type_of_meal_plan": ("category", pick(["Meal Plan 1", "Not Selected"])),
            "date_of_arrival": ("time", missing(when("%d/%m/%Y"), 0.003, "29/02/2018")),
            "avg_price_per_room": ("number", amount(100)),
            "booking_status": ("label", outcome("Canceled", "Not_Canceled"))}, label="booking_status"),
    Log(name="Airbnb first booking", file="airbnb.csv", order="random", start="2012-01-01", days=700, columns={
        "id": ("out", random_key("{hex16}")), "date_account_created": ("time|out", when("%Y-%m-%d")),
            "timestamp_first_active": ("time|out", each(when("%Y%m%d%H%M%S", -500), int)),
            "gender": ("category", pick(["-unknown-", "FEMALE", "MALE"])),
            "age": ("number", missing(normal(36, 9, 0), 0.4)),
            "signup_method": ("category", pick(["facebook", "basic"])),
            "signup_flow": (FEATURE, pick([0, 3, 12, 24, 25])), "first_browser": ("category", pick(BROWSERS)),
            "booked": ("label", outcome())}),
    Log(name="Foursquare check-ins", file="foursquare.txt", separator="\t", start="2012-04-03", days=300,
        columns={
        "userId": ("user", ids("user", high=1083)), "venueId": ("item|category", ids("item", "4{hex16}")),
            "venueCategory": ("category|list",
            trait("item", ["Arts & Crafts Store", "Bridge", "Home (private)", "Coffee Shop"])),
            "latitude": ("number", trait("item", lambda r: round(40.7 + r.normal() / 9, 6))),
            "longitude": ("number", trait("item", lambda r: round(-74 + r.normal() / 9, 6))),
            "timezoneOffset": (FEATURE, pick([-240, -240, -300])),
        "utcTimestamp": ("time", when("%a %b %d %H:%M:%S +0000 %Y")), "returned": ("label", outcome())}),
    Log(name="Gowalla", file="gowalla.tsv", separator="\t", header=False, order="user", start="2009-02-01",
        days=600, columns={
        "u": ("category", ids("user")), "t": ("time", when("%Y-%m-%dT%H:%M:%SZ")),
            "lat": ("number", normal(30, 9, 6)), "lon": ("number", normal(-97, 9, 6)),
            "loc": ("category", ids("item")), "y": ("label", outcome())}),
    Log(name="taxi trips", file="taxi.parquet", start="2023-01-01", days=31, columns={
        "VendorID": ("category", pick([1, 2])), "tpep_pickup_datetime": ("time", datetimes),
            "passenger_count": (FEATURE, pick([1.0, 2.0, 3.0])), "trip_distance": ("number", amount(2)),
            "PULocationID": ("category", codes(110, 1, 265)), "payment_type": ("category", pick([1, 2])),
            "fare_amount": ("number", amount(14)), "tipped": ("label", outcome())}),
    Log(name="flight delays", file="flights.csv", order="random", start="2022-01-01", days=300, columns={
        "FL_DATE": ("time", when("%m/%d/%Y 12:00:00 AM")), "OP_CARRIER": ("category", pick(["AA", "DL", "UA"])),
            "TAIL_NUM": ("category", codes(200, form="N{}A")), "ORIGIN": ("category", codes(50, form="A{}")),
            "CRS_DEP_TIME": ("number|category", each(when("%H%M"), int)),
            "DISTANCE": ("number", whole(90, 2500)), "ARR_DEL15": ("label", outcome(1.0, 0.0))},
            label="ARR_DEL15"),
]  # fmt: skip

TABLES = [
    Log(name="adult census", file="adult.csv", order="random", columns={
        "age": ("number", whole(17, 90)), "workclass": ("category", pick(["Private", "State-gov", "?"])),
            "fnlwgt": ("number|weight", amount(180_000, 0.5, 0)),
            "education": ("category", pick(["HS-grad", "Bachelors", "Masters"])),
            "education-num": (FEATURE, whole(1, 17)),
            "capital-gain": ("number", missing(whole(100, 99999), 0.92, 0)),
            "hours-per-week": ("number", whole(10, 80)),
            "native-country": ("category", pick(["United-States", "Mexico", "?"])),
            "income": ("label", outcome(">50K", "<=50K"))}),
    Log(name="bank marketing", file="bank.csv", separator=";", quoted=True, order="random", columns={
        "age": ("number", whole(18, 88)), "job": ("category", pick(["admin.", "technician", "retired"])),
            "default": ("category", pick(["no", "unknown", "yes"])),
            "balance": ("number", normal(1300, 900, 0)), "day": (FEATURE, whole(1, 32)),
            "month": ("category", pick(["jan", "may", "jul", "nov"])), "duration": ("number", counts(250)),
            "campaign": (FEATURE, each(counts(1), lambda x: x + 1)),
            "pdays": ("number|category", missing(whole(1, 400), 0.8, -1)),
            "euribor3m": ("number", normal(3, 1)), "y": ("label", outcome(*YES))}),
    Log(name="telco churn", file="telco.csv", order="random", columns={
        "customerID": ("out", numbered(1000, "{}-VHVEG")), "gender": ("category", pick(["Female", "Male"])),
            "SeniorCitizen": (FEATURE, pick([0, 0, 1])), "Partner": ("category", pick(["Yes", "No"])),
            "tenure": ("number", whole(0, 73)),
            "Contract": ("category", pick(["Month-to-month", "One year", "Two year"])),
            "MonthlyCharges": ("number", normal(64, 20, 2)),
            "TotalCharges": ("number", missing(amount(900), 0.01, " ")),
            "Churn": ("label", outcome("Yes", "No"))}),
    Log(name="in-vehicle coupons", file="vehicle.csv", order="random", columns={
        "destination": ("category", pick(["Home", "Work", "No Urgent Place"])),
            "temperature": (FEATURE, pick([30, 55, 80])),
            "time": ("category", pick(["2PM", "10AM", "6PM", "7AM", "10PM"])),
            "coupon": ("category", pick(["Bar", "Coffee House", "Carry out & Take away"])),
            "expiration": ("category", pick(["1d", "2h"])),
            "age": ("category", pick(["21", "26", "31", "50plus", "below21"])),
            "Bar": ("category", pick(["never", "less1", "1~3", "gt8"])),
            "toCoupon_GEQ5min": ("out|category", fixed(1)), "Y": ("label", outcome())}),
    Log(name="online shoppers", file="shoppers.csv", order="random", columns={
        "Administrative": (FEATURE, counts(2)),
            "Administrative_Duration": ("number", missing(amount(80, digits=4), 0.4, 0.0)),
            "BounceRates": ("number", normal(0.02, 0.01, 6)),
            "PageValues": ("number", missing(amount(20, digits=4), 0.7, 0.0)),
            "Month": ("category", pick(["Feb", "Mar", "May", "Nov", "Dec"])),
            "OperatingSystems": ("category|number", whole(1, 9)),
            "VisitorType": ("category", pick(["Returning_Visitor", "New_Visitor"])),
            "Weekend": ("category|number", pick(["FALSE", "TRUE"])),
            "Revenue": ("label", outcome("TRUE", "FALSE"))}, label="Revenue"),
    Log(name="job change", file="job.csv", order="random", columns={
        "enrollee_id": ("out", random_key("{}")), "city": ("category", codes(60, form="city_{}")),
            "city_development_index": ("number", normal(0.8, 0.1, 3)),
            "gender": ("category", missing(pick(["Male", "Female"]), 0.2)),
            "experience": ("category", pick([">20", "<1", "5", "10"])),
            "company_size": ("category", missing(pick(["50-99", "100-500", "10000+"]), 0.3)),
            "last_new_job": ("category", pick(["never", ">4", "1", "2"])),
            "training_hours": ("number", whole(1, 330)), "target": ("label", outcome(1.0, 0.0))}),
    Log(name="credit default", file="credit.csv", order="random", columns={
        "ID": ("out", numbered(1)), "LIMIT_BAL": ("number", each(whole(1, 80), lambda x: x * 10_000)),
            "SEX": ("category|number", pick([1, 2])), "EDUCATION": (FEATURE, pick([1, 2, 3, 4])),
            "AGE": ("number", whole(21, 75)), "PAY_0": (FEATURE, pick([-2, -1, 0, 1, 2])),
            "BILL_AMT1": ("number", normal(50_000, 30_000, 0)), "PAY_AMT1": ("number", amount(3000, digits=0)),
            "default payment next month": ("label", outcome())}, label="default payment next month"),
    Log(name="Titanic", file="titanic.csv", order="random", rows=800, columns={
        "PassengerId": ("out", numbered(1)), "Survived": ("label", outcome()),
            "Pclass": (FEATURE, pick([1, 2, 3])),
            "Name": ("out|category|list", numbered(1, "Braund, Mr. Owen {}")),
            "Sex": ("category", pick(["male", "female"])), "Age": ("number", missing(normal(30, 12, 1), 0.2)),
            "SibSp": (FEATURE, pick(range(6), 2)), "Ticket": ("category|out", codes(500, form="A/5 {}")),
            "Fare": ("number", amount(15, digits=4)),
            "Cabin": ("category", missing(codes(90, form="C{}"), 0.7)),
            "Embarked": ("category", pick(["S", "C", "Q"]))}),
    Log(name="credit card fraud", file="fraud.csv", rate=0.04, days=2, columns={
        "Time": ("time|number", elapsed()), **{f"V{x}": ("number", normal(0, 1, 6)) for x in range(1, 4)},
            "Amount": ("number", amount(30)), "Class": ("label", outcome())}, label="Class"),
    Log(name="IEEE fraud", file="ieee.csv", rate=0.05, columns={
        "TransactionID": ("out", numbered(2_987_000)), "isFraud": ("label", outcome()),
            "TransactionDT": ("time|number", each(elapsed(), lambda x: x + 86_400)),
            "TransactionAmt": ("number", amount(70)), "ProductCD": ("category", pick("WCHRS")),
            "card1": ("category|number", codes(300, 1000, 18400)),
            "card4": ("category", pick(["visa", "mastercard"])),
            "addr1": ("category|number", missing(codes(60, 100, 540), 0.1)),
            "P_emaildomain": ("category", missing(pick(["gmail.com", "yahoo.com"]), 0.2)),
            "M1": ("category", missing(pick("TF"), 0.4))}, label="isFraud"),
    Log(name="insurance cross-sell", file="insurance.csv", order="random", columns={
        "id": ("out", numbered(1)), "Gender": ("category", pick(["Male", "Female"])),
            "Age": ("number", whole(20, 85)), "Region_Code": ("category|number", each(whole(0, 53), float)),
            "Vehicle_Age": ("category", pick(["1-2 Year", "< 1 Year", "> 2 Years"])),
            "Annual_Premium": ("number", each(amount(30000, 0.4, 0), float)),
            "Policy_Sales_Channel": ("category|number", each(codes(90, 1, 163), float)),
            "Vintage": ("number", whole(10, 299)), "Response": ("label", outcome())}),
    Log(name="HR promotion", file="hr.csv", order="random", columns={
        "employee_id": ("out", random_key("{}")), "department": ("category", pick(["Sales", "HR", "R&D"])),
            "recruitment_channel": ("category", pick(["sourcing", "other"])),
            "no_of_trainings": (FEATURE, pick([1, 2, 3])),
            "previous_year_rating": (FEATURE, missing(pick([1.0, 3.0, 5.0]), 0.1)),
            "length_of_service": ("number", whole(1, 37)),
            "date_of_birth": ("out", trait("session",
                lambda r: f"{r.integers(1955, 1999)}-{r.integers(1, 13):02d}-{r.integers(1, 29):02d}")),
            "is_promoted": ("label", outcome())}, label="is_promoted"),
    Log(name="marketing leads", file="leads.csv", order="random", start="2022-01-01", days=400, columns={
        "Lead Number": ("out", random_key("{}")),
            "Lead Source": ("category", pick(["Google", "Organic Search", "Referral"])),
            "TotalVisits": ("number|category", counts(3)), "Time Spent on Website": ("number", whole(0, 2200)),
            "Last Notable Activity Date": ("time|out", when("%b %d, %Y")),
            "Country": ("category", missing(pick(["India", "Qatar"]), 0.2)),
            "Asymmetrique Score": (FEATURE, missing(whole(11, 20), 0.4)), "Converted": ("label", outcome())}),
]  # fmt: skip

SERVICES = [
    Log(name="app events", file="events.jsonl", columns={
        "ts": ("time", when("%Y-%m-%dT%H:%M:%S.250Z")), "user_id": ("user", ids("user", uuid)),
            "device_model": ("category", codes(40, form="SM-{}")),
            "os_version": ("category", pick(["14.1", "15.0.2", "16.3"])),
            "screen": ("category", pick(["home", "feed", "profile"])), "item": ("item", ids("item")),
            "created_at": ("out", trait("user",
                lambda r: written(1640995200 + int(r.integers(0, 10**7)), "%Y-%m-%dT%H:%M:%S.000Z"))),
            "tapped": ("label", each(outcome(), bool))}, label="tapped"),
    Log(name="web server log", file="access.csv", separator=" ", start="2023-05-02", days=12, columns={
        "ip": ("category|user", codes(300, form="10.1.{}.7")),
            "time": ("time", each(when("%d/%b/%Y:%H:%M:%S +0000"), lambda x: f"[{x}]")),
            "request": ("category|list", codes(80, form="GET /p/{} HTTP/1.1")),
            "status": ("category", pick([200, 301, 404, 500])), "bytes": ("number", amount(4000, digits=0)),
            "bot": ("label", outcome())}),
    Log(name="web server times without brackets", file="access.tsv", separator="\t", days=12, columns={
        "host": ("category", codes(300, form="10.1.{}.7")), "time": ("time", when("%d/%b/%Y:%H:%M:%S "
                                                                                  "+0000")),
            "path": ("category", codes(80, form="/p/{}.html")), "bytes": ("number", amount(4000, digits=0)),
            "clicked": ("label", outcome())}),
    Log(name="database export with zone names", file="export.csv", days=200, columns={
        "occurred": ("out|time", when("%Y-%m-%d %H:%M:%S CEST")), "member": ("user", ids("user")),
            "offer": ("item", ids("item")), "opened": ("label", outcome())}, label="opened"),
    Log(name="sign-up date of users", file="signup.csv", columns={
        "user_id": ("user", ids("user")), "item_id": ("item", ids("item")),
            "registration_time": ("out", trait("user",
                lambda r: f"20{r.integers(10, 19)}{r.integers(1, 13):02d}{r.integers(1, 29):02d}")),
            "label": ("label", outcome())}),
    Log(name="sign-up date and time", file="signup2.csv", columns={
        "uid": ("user", ids("user")), "joined": ("out",
                trait("user", lambda r: written(1640995200 + int(r.integers(0, 10**7)), "%Y-%m-%d"))),
            "ad_id": ("item", ids("item")),
            "upload_date": ("out", trait("item",
                lambda r: written(1540995200 + int(r.integers(0, 10**8)), "%Y-%m-%d"))),
            "ts": ("time", since_1970()), "label": ("label", outcome())}),
    Log(name="accounts of advertisers", file="accounts.csv", columns={
        "user_id": ("user", ids("user")), "account_id": ("category", codes(100)),
            "placement": ("category", pick(range(30))), "impressions_7d": ("number", counts(60)),
            "event_date": ("time", when("%d-%b-%Y")), "click": ("label", outcome())}),
    Log(name="spreadsheet with serial dates", file="serial.csv", days=120, columns={
        "date": ("out", each(since_1970(kind=float), lambda x: round(x / 86400 + 25569, 5))),
            "client": ("user", ids("user")), "product": ("item", ids("item")), "amount": ("number", amount(40)),
            "bought": ("label", outcome())}),
    Log(name="email campaign", file="email.csv", start="2023-01-10", days=60, columns={
        "email": ("user|category", ids("user", "p{}@example.org")), "campaign_id": ("category", codes(70)),
            "sent_at": ("time", when("%d.%m.%Y %H:%M:%S")),
            "opened_at": ("leak", only(when("%d.%m.%Y %H:%M:%S", 4000))),
            "subject_len": ("number|category", whole(12, 80)), "unsubscribed": (FEATURE, pick([0, 0, 0, 1])),
            "clicked": ("label", outcome())}),
    Log(name="push notifications", file="push.parquet", columns={
        "push_time": ("time", since_1970(1_000_000)), "user": ("user", ids("user")),
            "app_version": ("category", pick(["4.1.0", "4.2.1"])),
            "embedding": ("list|out|number", vector(8, key="item")), "campaign": ("category", codes(60)),
            "topics": ("list", some_of(["a", "b", "c", "d"], None)), "opened": ("label", outcome())},
            label="opened"),
    Log(name="game purchases", file="game.csv", columns={
        "player_id": ("user", ids("user", "P{:07d}")), "level": ("number", whole(1, 120)),
            "gold": ("number", amount(3e6, 2, 0)), "xp": ("number", amount(9e8, 0.6, 0)),
            "install_ts": ("out", trait("user", lambda r: 1672531200 + int(r.integers(0, 10**7)))),
            "event_ts": ("time", since_1970()), "offer_id": ("item", ids("item")),
            "purchased": ("label", outcome())}),
    Log(name="search with slates", file="search.csv", days=20, columns={
        "query_id": ("session", rising()), "query": ("category|list|out", words(2, "session")),
            "doc_id": ("item|category", ids("item")), "rank": ("number|category", pick(range(1, 11))),
            "bm25": ("number", amount(12, 0.4, 4)), "dt": ("time", when("%Y/%m/%d %H:%M:%S")),
            "clicked": ("label", outcome())}),
    Log(name="one user several visits", file="visits.csv", order="random", columns={
        "fullVisitorId": ("user", ids("user", "{:019d}")),
            "visitId": ("session", each(rising(), lambda x: 1472830000 + x * 997)),
            "date": ("time", when("%Y%m%d")),
            "pageviews": ("number|category", each(counts(4), lambda x: x + 1)),
            "country": ("category", trait("user", COUNTRIES)),
            "isMobile": ("category|number", trait("session", ["true", "false"])),
            "converted": ("label", outcome())}),
    Log(name="Japanese coupons", file="ponpare.csv", start="2011-07-01", days=300, columns={
        "USER_ID_hash": ("user", ids("user", "{hex32}")), "I_DATE": ("time", when("%Y-%m-%d %H:%M:%S")),
            "PAGE_SERIAL": ("number|category|out", whole(0, 900)),
            "VIEW_COUPON_ID_hash": ("item", ids("item", "{hex32}")),
            "SESSION_ID_hash": ("session", each(rising(), lambda x: f"{x:032x}")),
            "PURCHASE_FLG": ("label", outcome())}, label="PURCHASE_FLG"),
    Log(name="courses", file="mooc.tsv", separator="\t", order="user", columns={
        "learner": ("user|category", ids("user")),
            "course_id": ("item|category", ids("item", "course-v1:X+{}")),
            "enrolled": ("time", when("%d %B %Y")), "watch_seconds": ("number", counts(900)),
            "certified": ("label", outcome(*YES))}),
    Log(name="streams with Hive separators", file="hive.csv", separator="\x01", days=9, columns={
        "uid": ("user", ids("user")), "vid": ("item|category", ids("item")),
            "tags": ("list", some_of(["a", "b", "c"], "\x02", 3, "item")), "ts": ("time", since_1970(1000)),
            "click": ("label", outcome())}),
    Log(name="one stamp of zero", file="zero.csv", days=3, rows=2000, columns={
        "time": ("time", one_odd(0)), "user": ("user", ids("user")), "item": ("item", ids("item")),
            "click": ("label", outcome())}),
    Log(name="one stamp in 2058", file="future.csv", days=3, rows=2000, columns={
        "time": ("time", one_odd(2_790_000_000)), "user": ("user", ids("user")), "item": ("item", ids("item")),
            "click": ("label", outcome())}),
    Log(name="months only", file="months.csv", days=700, columns={
        "month": ("out|category", when("%Y-%m")), "customer_id": ("user", ids("user")),
            "plan": ("category", pick(["basic", "pro"])), "spend": ("number", amount(30)),
            "churned": ("label", outcome())}),
    Log(name="German dates in words", file="woerter.csv", separator=";", days=300, columns={
        "datum": ("out", german_dates), "user": ("user", ids("user")), "seite": ("category", codes(60)),
            "klick": ("label", outcome())}),
    Log(name="compact ISO times", file="compact.csv", days=12, columns={
        "at": ("time", when("%Y%m%dT%H%M%SZ")), "subscriber": ("user", ids("user")),
            "article": ("item", ids("item")), "label": ("label", outcome())}),
    Log(name="ten-digit ids", file="phones.csv", order="random", columns={
        "user_id": ("user", ids("user")),
            "phone": ("category|out", ids("user", low=1_510_000_000, high=1_990_000_000)),
            "item_id": ("item", ids("item", low=1_200_000_000, high=1_700_000_000)),
            "seller": ("category", codes(90, 1_000_000_000, 2_000_000_000)), "amount": ("number", amount(20)),
            "label": ("label", outcome())}),
    Log(name="sample weights by importance", file="ipw.csv", columns={
        "y": ("label", outcome()), "sample_weight": ("weight", amount(1, 0.3, 4)), "t": ("time", since_1970()),
            "member_id": ("user", ids("user")), "arm": ("item|category", ids("item", "arm{}")),
            "weight_kg": ("number", normal(70, 9, 1)), "propensity": ("number", normal(0.3, 0.05, 4))}),
    Log(name="clock without a date", file="clock.csv", columns={
        "time": ("out", when("%H:%M:%S")), "user": ("user", ids("user")), "item": ("item", ids("item")),
            "label": ("label", outcome())}),
]  # fmt: skip

LOGS = [*MOVIES, *ADS, *SHOPS, *MEDIA, *TRAVEL, *TABLES, *SERVICES]
