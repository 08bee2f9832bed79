"""What every load is made of: when messages leave, what is in them, what became of each; and `pixiu bench`."""
