"""An error has two lines, for any number of flags."""

import pytest

from paxkv import compile as compile_command
from paxkv import serve
from paxkv.entrypoints.cli import generate
from paxkv.entrypoints.cli.command_parser import CommandParser


@pytest.mark.parametrize(
    ("make_parser", "prog"),
    [
        (serve.make_parser, "paxkv serve"),
        (compile_command.make_parser, "paxkv compile"),
        (generate.make_parser, "paxkv generate"),
    ],
)
def test_error_names_the_command_without_its_usage(capsys, make_parser, prog):
    parser = make_parser()
    assert isinstance(parser, CommandParser)
    with pytest.raises(SystemExit) as raised:
        parser.error("what is wrong")
    assert raised.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{prog}: error: what is wrong",
        f"{prog} --help lists all flags.",
    ]
