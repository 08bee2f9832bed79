"""Parts of a load: the times, contents and outcomes of its messages; and `pixiu bench`."""
