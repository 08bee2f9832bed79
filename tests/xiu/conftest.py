"""The fixtures of real processes."""

from tests.support.roles import roles  # noqa: F401
from tests.support.zookeeper import zookeeper_server  # noqa: F401
