"""Listeners for NSQ's clients, which find durable topics behind them. Source: docs/nsq.md."""
