"""`CommandParser`: an argument parser whose errors are not lost under a screen of usage."""

import argparse
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """For commands with a flag for every setting, whose usage is longer than a screen."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with what is wrong, and where all flags are listed."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists all flags.\n")
