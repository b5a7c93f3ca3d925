"""`CommandParser`: an argument parser that does not print the usage with every error."""

import argparse
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """Parses commands whose usage is longer than a screen."""

    def error(self, message: str) -> NoReturn:
        """Prints the error and a hint to --help, and ends the program."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists all flags.\n")
