"""``foresay COMMAND ...``: flags from the fields of :mod:`foresay.server.settings.config`; errors are one line, without
a traceback.

Nothing here imports torch, transformers or aiohttp, so ``--help`` answers at once.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
from argparse import (
    SUPPRESS,
    Action,
    ArgumentParser,
    BooleanOptionalAction,
    Namespace,
    RawDescriptionHelpFormatter,
)
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

import foresay
from foresay.server.cli import (
    INTERRUPTED,
    bench,
    chat,
    generate,
    launch,
    prove,
    pull,
    serve,
    train,
)
from foresay.server.cli.command import USAGE_ERROR, Command, command, report_error
from foresay.server.settings.fields import Setting, settings_of
from foresay.server.settings.load import load
from foresay.server.settings.resolved import check_names
from foresay.spec.errors import ForesayError

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "aiohttp", "msgspec")


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@command(None)
def version(config: None, arguments: Namespace) -> int:
    """What is installed.

    foresay version
    """
    print(f"foresay {foresay.__version__}")
    for package in PACKAGES:
        print(f"{package} {_installed(package)}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    return 0


#: The commands as the overview shows them: those for newcomers first.
GROUPS: dict[str, tuple[Command, ...]] = {
    "use a model:": (serve.serve, chat.chat, generate.generate, launch.launch),
    "choose one:": (pull.show_models, pull.pull, pull.check, pull.quantize),
    "make it faster:": (bench.bench, prove.prove, train.run),
    "run a server:": (serve.show_config, serve.keys, serve.reload, serve.deploy, version),
    "as in Ollama:": (chat.run, pull.list_models, pull.ps, pull.remove),
}
COMMANDS: dict[str, Command] = {command.name: command for group in GROUPS.values() for command in group}


class Parser(ArgumentParser):
    """An argument parser whose errors are one line. passes_on: words after ``--`` are for another program."""

    passes_on = False

    def error(self, message: str) -> NoReturn:
        """Print the message on one line and exit with status 2."""
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_strictly(self, arguments: Sequence[str]) -> Namespace:
        """Parse all arguments, those for the other program as ``words``."""
        end = arguments.index("--") if self.passes_on and "--" in arguments else len(arguments)
        several = any(action.nargs == "*" for action in self._actions if not action.option_strings)
        parse = self.parse_known_intermixed_args if several else self.parse_known_args  # allows flags between words
        parsed, unknown = parse(arguments[:end])
        if unknown:  # without what may be a secret
            self.error(f"unrecognized arguments: {unknown[0].partition('=')[0]}")
        parsed.words = list(arguments[end + 1 :])
        return parsed


class _ShowAll(Action):
    """``--help-all``: the help with every flag."""

    def __call__(self, parser: ArgumentParser, *ignored: object) -> NoReturn:
        build_parser(COMMANDS[parser.prog.rpartition(" ")[2]], everything=True).print_help()
        parser.exit()


def build_parser(command: Command, everything: bool = False) -> Parser:
    """The parser of one command: TARGET, the flags of its config by group, and its own arguments. everything: the help
    shows all flags of the config, not only the common ones."""
    examples = "\n".join(f"  {line}" for line in command.examples)
    parser = Parser(
        prog=f"foresay {command.name}",
        description=command.summary[0].upper() + command.summary[1:] + ".",
        epilog=f"examples:\n{examples}{_EVERYWHERE if command.config else ''}",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for add in command.before:
        add(parser)
    if command.config is not None:
        hint = f"the other {len(settings_of(command.config)) - 1 - _common(command)} flags too"
        parser.add_argument("--help-all", action=_ShowAll, nargs=0, help=hint)
        _add_settings(parser, settings_of(command.config), everything)
    else:
        parser.add_argument("--help-all", action="help", help=SUPPRESS)  # --help shows all flags
    for add in command.after:
        add(parser)
    parser.passes_on = command.passes_on
    ends = ["[-- ARGUMENTS]"] if command.passes_on else []
    parser.usage = " ".join([parser.prog, *_positionals(parser), "[flags]", *ends])
    return parser


def _common(command: Command) -> int:
    """The number of its config's flags that the short help shows."""
    assert command.config is not None
    return sum(setting.is_common for setting in settings_of(command.config).values())


def _positionals(parser: Parser) -> list[str]:
    """The positional arguments, as the usage line shows them."""
    actions = [action for action in parser._actions if not action.option_strings]
    named = {action: str(action.metavar or action.dest.upper()) for action in actions}
    return [f"[{name}]" if action.nargs in ("?", "*") else name for action, name in named.items()]


_EVERYWHERE = """

Every flag is also a variable (--draft-tokens is FORESAY_DRAFT_TOKENS) and a
key in a TOML file, which foresay config show prints. A flag wins over a
variable, a variable over the file.
"""


def _add_settings(parser: ArgumentParser, settings: dict[str, Setting], everything: bool) -> None:
    target = settings["target"]
    parser.add_argument("target", nargs="?", default=SUPPRESS, metavar="TARGET", help=_help(target))
    parser.add_argument("--config", metavar="FILE", help="a TOML file with settings (default: FORESAY_CONFIG)")
    groups: dict[str, Any] = {}
    for setting in settings.values():
        if setting is not target:
            group = groups.setdefault(setting.group, None) or parser.add_argument_group(setting.group)
            groups[setting.group] = group
            _add_flag(group, setting, everything or setting.is_common)


def _add_flag(group: Any, setting: Setting, shown: bool) -> None:
    help = _help(setting) if shown else SUPPRESS
    options: dict[str, Any] = {"dest": setting.name, "default": SUPPRESS, "help": help}
    if setting.is_switch:
        options["action"] = BooleanOptionalAction
    else:
        options["metavar"] = setting.metavar or "|".join(setting.choices)
        options["action"] = "append" if setting.is_list else "store"
    group.add_argument(setting.flag, **options)


def _help(setting: Setting) -> str:
    """The description and the default; argparse needs percent signs doubled."""
    shown = f" (default: {_shown(setting.default)})" if setting.default not in (None, ()) else ""
    return (setting.description + shown).replace("%", "%%")


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def overview() -> str:
    """What ``foresay --help`` prints."""
    width = max(map(len, COMMANDS))
    groups = [
        "\n".join([title, *(f"  {command.name:<{width}}  {command.summary}" for command in group)])
        for title, group in GROUPS.items()
    ]
    return "\n\n".join([_USAGE, *groups, _HINTS])


_USAGE = """\
usage: foresay COMMAND [TARGET] [flags]

Serve a large language model with speculative decoding: the same tokens, sooner."""

_HINTS = """\
foresay COMMAND --help shows the usual flags of a command, --help-all all of
them. TARGET is a directory, a GGUF file, a Hugging Face hub id or a short name
(smollm2; see foresay models); without it the small bundled model, which needs
no download."""


def _run(command: Command, arguments: Sequence[str]) -> int:
    parsed = build_parser(command).parse_strictly(arguments)
    if command.config is None:
        return command.run(None, parsed)
    known = settings_of(command.config)
    given = {name: value for name, value in vars(parsed).items() if name in known}
    loaded = load(command.config, given, os.environ, parsed.config)
    if not (command.elsewhere or getattr(parsed, "url", None)):
        check_names(loaded.config)
    return command.run(loaded.config, parsed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    2: flags, variables, settings or settings files are wrong. 1: other failures, such as a model that cannot be
    fetched, an address in use, or a check that found something.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: the next file to be opened would take its place, in the engine too
            os.set_inheritable(nowhere := os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(nowhere, "r+"))  # noqa: SIM115
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["-h"], ["--help"], ["help"]) and words[1:]:
        words = [words[1], "--help"]
    if words[:1] in (["--version"], ["-v"], ["-V"]):
        words[0] = "version"
    try:
        try:
            return _obey(words)
        finally:
            sys.stdout.flush()  # notices a closed pipe here rather than at interpreter exit
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:  # EPIPE: the reader of our output left; not worth a message
            print(f"foresay: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _obey(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else USAGE_ERROR
    if words[0] not in COMMANDS:
        print(f"foresay: unknown command {words[0]} (see foresay --help)", file=sys.stderr)
        return USAGE_ERROR
    command = COMMANDS[words[0]]
    try:
        return _run(command, words[1:])
    except ForesayError as error:
        return report_error(command.name, error)
