"""Plays a real chat log through a cluster and checks every delivery."""
