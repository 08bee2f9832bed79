"""`format("pixiu")`: Spark's view of a cluster: its stores in `pipeline.spark`, and with the option `topic` topics in
`pipeline.topics`.

Source: docs/pipeline.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from pipeline.spark.options import ReadOptions, check_foreign, read_options, write_options
from pipeline.spark.schema import spark_schema
from pipeline.spark.source import PixiuReader, PixiuStreamReader, with_schema
from pipeline.topics import columns
from pipeline.topics.source import TopicReader, TopicStreamReader
from pixiu.errors import InvalidArgument
from pixiu.wire.export_tables import MESSAGES, columns_of


class PixiuSource(DataSource):
    """The data source behind `format("pixiu")`."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "pixiu"

    def schema(self) -> StructType:
        """The schema of the table, or of a topic, and of the columns that the options name."""
        check_foreign(self.options)
        options = {name.lower(): value for name, value in self.options.items()}
        names = [part.strip() for part in options.get("columns", "").split(",") if part.strip()]
        headers = options.get("includeheaders", "").strip().lower()
        if self._is_topic:
            return columns.spark_schema(columns.columns_of(names, headers=headers != "false"))
        return spark_schema(columns_of(options.get("table", MESSAGES).strip().lower(), names), headers=headers == "true")

    @property
    def _is_topic(self) -> bool:
        return any(name.lower() == "topic" for name in self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make the reader of `spark.read`."""
        options = dict(self.options)
        if self._is_topic:
            return TopicReader.of(options, schema)
        return PixiuReader(mail_options(options, schema, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Make the reader of `spark.readStream`."""
        options = dict(self.options)
        if self._is_topic:
            return TopicStreamReader.of(options, schema)
        return PixiuStreamReader(mail_options(options, schema, streaming=True))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make the writer of `df.write`."""
        from pipeline.spark.sink import PixiuBatchWriter, columns_to_write
        from pipeline.topics.sink import TopicBatchWriter

        if overwrite:
            raise InvalidArgument('messages that were sent cannot be overwritten: write with .mode("append")')
        if self._is_topic:
            return TopicBatchWriter.of(dict(self.options), schema)
        options = write_options(dict(self.options))
        return PixiuBatchWriter(options, columns_to_write(schema, options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Make the writer of `df.writeStream`."""
        from pipeline.spark.sink import PixiuStreamWriter, columns_to_write
        from pipeline.topics.sink import TopicStreamWriter

        if overwrite:
            raise InvalidArgument('messages that were sent cannot be overwritten: use .outputMode("append")')
        if self._is_topic:
            return TopicStreamWriter.of(dict(self.options), schema)
        options = write_options(dict(self.options))
        return PixiuStreamWriter(options, columns_to_write(schema, options))


def mail_options(options: Mapping[str, str], schema: StructType, *, streaming: bool) -> ReadOptions:
    """The options of a read of a table, with the columns of a schema. If no option says what is read, a schema that fits a topic
    is refused: of a table whose OPTIONS in CREATE TABLE name a topic Spark hands over the columns alone, and mail has some of them
    too. Raises InvalidArgument."""
    found, named = read_options(options, streaming=streaming), {name.lower() for name in options}
    types = {name: kind for name, (kind, _) in columns.TYPES.items()}
    if schema.names and named.isdisjoint(("table", "columns")) and all(types.get(f.name) == f.dataType for f in schema.fields):
        raise InvalidArgument(
            f"columns {', '.join(schema.names)} are those of a topic, and there is no option topic here: in SQL give it at each "
            "use, WITH ('target' = '…', 'topic' = 'clicks'), as Spark does not pass on what CREATE TABLE has; for mail give option "
            "table = messages"
        )
    return with_schema(found, schema)
