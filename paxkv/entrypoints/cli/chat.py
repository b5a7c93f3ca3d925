"""`paxkv chat`: a conversation with a running server, in a terminal."""

from paxkv.entrypoints.command_end import INTERRUPTED, end_by_signals, run_command

# Before the imports below, which are slow.
if __name__ == "__main__":
    end_by_signals()

import argparse
import contextlib
import sys
from collections.abc import Sequence

from paxkv.config.environment import API_KEY_VARIABLES, words_from_environment
from paxkv.entrypoints.cli.arguments import parse_arguments
from paxkv.entrypoints.cli.chat_client import ChatClient, ChatError

Message = dict[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Talks until the input ends; returns the exit code of the process."""
    namespace = parse_arguments(make_parser(), arguments)
    try:
        client = ChatClient(
            namespace.url, api_key=_api_key(namespace), ca_certs=namespace.ssl_ca_certs
        )
        model = namespace.model_name or client.first_model()
        params = {"temperature": namespace.temperature, "max_tokens": namespace.max_tokens}
        params = {name: value for name, value in params.items() if value is not None}
        system = namespace.system_prompt
        history: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        if namespace.quick is not None:
            answer(client, model, [*history, {"role": "user", "content": namespace.quick}], params)
        else:
            talk(client, model, history, params)
    except ChatError as error:
        print(f"paxkv: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    return 0


def make_parser() -> argparse.ArgumentParser:
    """vLLM's flags of the same command, and a few sampling parameters."""
    parser = argparse.ArgumentParser(
        prog="paxkv chat",
        description="Talks to a running server. Each line is a message. Ctrl-C stops an answer, "
        "and Ctrl-D ends the chat. Each message is sent with the conversation so far.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000/v1",
        metavar="URL",
        help="URL of the API (default: %(default)s)",
    )
    parser.add_argument(
        "--model-name", metavar="NAME", help="model to use; the server's first if left out"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="API key of the server; if left out, the first key in the variables "
        f"{' or '.join(API_KEY_VARIABLES)}, which other users cannot read",
    )
    parser.add_argument(
        "--ssl-ca-certs",
        metavar="FILE",
        help="certificates of the authority that signed the certificate of an https:// server",
    )
    parser.add_argument(
        "--system-prompt", metavar="TEXT", help="system message at the start of the conversation"
    )
    parser.add_argument(
        "-q", "--quick", metavar="TEXT", help="send one message, print the answer, and end"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="FLOAT",
        help="sampling temperature; the server's default if left out",
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="INT", help="largest number of tokens of an answer"
    )
    return parser


def talk(
    client: ChatClient, model: str, history: list[Message], params: dict[str, float | int]
) -> None:
    """Reads messages and prints answers. Failed and stopped answers do not enter the history."""
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            if is_terminal:
                print()
            return
        if not line.strip():
            continue
        messages = [*history, {"role": "user", "content": line.strip()}]
        try:
            text = answer(client, model, messages, params)
        except ChatError as error:
            print(f"paxkv: error: {error}", file=sys.stderr)
            continue
        except KeyboardInterrupt:
            print()
            continue
        history[:] = [*messages, {"role": "assistant", "content": text}]


def answer(
    client: ChatClient, model: str, messages: list[Message], params: dict[str, float | int]
) -> str:
    """Prints the answer as it arrives, and returns it."""
    text = ""
    # Ctrl-C closes the connection immediately, so the server stops computing.
    with contextlib.closing(client.stream(model, messages, **params)) as parts:
        for part in parts:
            print(part, end="", flush=True)
            text += part
    print()
    return text


def _api_key(namespace: argparse.Namespace) -> str:
    if namespace.api_key is not None:
        return namespace.api_key
    # The server accepts each of its keys.
    return next(iter(words_from_environment(API_KEY_VARIABLES)), "")


if __name__ == "__main__":
    sys.exit(run_command(main))
