"""The role topic: durable logs of blocks, and the channels that read them."""
