"""Who speaks for a batch where it is counted which users are hot."""

from __future__ import annotations

import random
from collections import Counter

from pixiu.wire.record import Kind, encode
from xiu.records.batch import drawn_user


def test_users_are_drawn_by_their_share_and_what_is_malformed_raises_nothing() -> None:
    keys = [7] * 12 + [100, 101, 102, 103]
    batch = b"".join(encode(Kind.MAIL, key, b"x" * key, 5) for key in keys)
    drawn = Counter(drawn_user(batch, len(keys), step / 160) for step in range(160))
    assert drawn == {7: 120, 100: 10, 101: 10, 102: 10, 103: 10}
    rng = random.Random(4)
    for _ in range(500):
        drawn_user(rng.randbytes(rng.randrange(80)), rng.randrange(1, 90), rng.random())
