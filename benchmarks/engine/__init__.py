"""Offline throughput of engines that run as processes of their own."""
