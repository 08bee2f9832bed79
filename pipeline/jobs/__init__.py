"""What operators run: each module has a `run` for a session and its arguments, and a command of `pixiu pipeline`."""
