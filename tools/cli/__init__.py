"""The `pixiu` command."""
