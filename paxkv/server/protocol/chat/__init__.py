"""Chats: messages and prompts of requests, answers and their parts. All APIs for chats use it."""
