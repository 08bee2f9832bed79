"""`python -m nsqdoor --target zk://…`: `pixiu nsq` alone."""

from nsqdoor.commands import main

if __name__ == "__main__":
    main()
