"""What the sink makes of rows: IDs that are the same for the same row, and sentences about what is missing. No Java."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, DoubleType, LongType, StringType, StructField, StructType

from pipeline.spark.options import write_options
from pipeline.spark.sink import columns_to_write, derived_id, rows_of
from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID

OPTIONS = {"target": "127.0.0.1:7000", "query": "q"}


def schema(**fields: object) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields.items()])


def test_an_id_is_of_the_query_and_the_values() -> None:
    assert derived_id("q", [1, "a", b"\0"]) == derived_id("q", [1, "a", b"\0"]) != derived_id("p", [1, "a", b"\0"])
    seen = {derived_id(query, values) for query in ("q", "q1") for values in ([1, 11], [11, 1], [111], ["1", "1", "1"], [])}
    assert len(seen) == 10
    assert all(0 < found <= MAX_ID for found in seen)
    with pytest.raises(InvalidArgument, match="null"):
        derived_id("q", [None])


@pytest.mark.parametrize(
    ("fields", "more", "said"),
    [
        ({"body": BinaryType(), "id": LongType()}, {}, "mail needs a column 'uin' \\(a whole number\\); there are body, id"),
        ({"uin": StringType(), "body": BinaryType(), "id": LongType()}, {}, "column 'uin' is a whole number, not string"),
        ({"uin": LongType(), "id": LongType()}, {}, "needs a column 'body'"),
        ({"uin": LongType(), "body": BinaryType()}, {}, "option idColumns is missing"),
        ({"uin": LongType(), "body": BinaryType()}, {"idColumns": "x"}, "idColumns names 'x', which is not a column"),
        ({"uin": LongType(), "body": BinaryType(), "x": DoubleType()}, {"idColumns": "x"}, "'x' is double"),
        ({"uin": LongType(), "body": BinaryType(), "id": LongType(), "lane": StringType()}, {}, "'lane' cannot be string"),
        ({"uin": LongType(), "body": BinaryType(), "id": LongType()}, {"kind": "room"}, "room needs a column 'room'"),
    ],
)
def test_what_is_missing_is_said(fields: dict[str, object], more: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        columns_to_write(schema(**fields), write_options(OPTIONS | more))


def test_where_a_row_comes_from_is_found() -> None:
    fields = {"uin": LongType(), "body": StringType()}
    for more in (("xiu_partition", "seq"), ("topic", "partition", "offset"), ("partition", "offset"), ("id",)):
        found = columns_to_write(schema(**fields, **dict.fromkeys(more, LongType())), write_options(OPTIONS))
        assert found.ids == more


def test_rows() -> None:
    found = columns_to_write(
        schema(uin=LongType(), body=StringType(), id=LongType(), lane=LongType(), lifetime_min=LongType()), write_options(OPTIONS)
    )
    batch = pa.RecordBatch.from_pydict(
        {"uin": [7, 8], "body": ["é", ""], "id": [1, 2], "lane": [0, None], "lifetime_min": [None, 5], "other": [None, None]}
    )
    first, second = rows_of(batch, found, "q")
    assert (first.key, first.body, first.lane, first.lifetime_min, first.id) == (7, "é".encode(), 0, 0, derived_id("q", [1]))
    assert (second.key, second.body, second.lane, second.lifetime_min) == (8, b"", 1, 5)
    with pytest.raises(InvalidArgument, match="a row has no uin"):
        list(
            rows_of(
                pa.RecordBatch.from_pydict({"uin": [None], "body": ["x"], "id": [1], "lane": [0], "lifetime_min": [0]}), found, "q"
            )
        )
