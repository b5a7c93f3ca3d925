"""The compiled programs and how they are compiled and stored."""
