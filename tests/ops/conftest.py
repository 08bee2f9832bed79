from tests.support.zookeeper import own_server, root, zookeeper, zookeeper_server

__all__ = ["own_server", "root", "zookeeper", "zookeeper_server"]
