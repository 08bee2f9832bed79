"""`python -m nsqdoor.migration`: `pixiu nsq-proxy` alone."""

from nsqdoor.migration.commands import nsq_proxy

if __name__ == "__main__":
    nsq_proxy()
