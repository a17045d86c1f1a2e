"""`leasehold console`, which serves the console of a pool until Ctrl-C."""

from importlib.util import find_spec
from pathlib import Path

import click
from leasehold.errors import BadInput, LeaseholdError

from bots.cli.caller import Caller

#: Where a log-in in clear stays on this machine.
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command()
@click.option("--url", metavar="URL", help="The gateway [env LEASEHOLD_URL; default: <data>/gateway.url].")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Data directory of a local pool [env LEASEHOLD_DATA; default: ~/.local/share/leasehold, "
    "for root /var/lib/leasehold].",
)
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=7412, show_default=True, help="0 = any free one.")
@click.option("--certificate", type=click.Path(path_type=Path, dir_okay=False), help="PEM file with the certificates.")
@click.option("--key", type=click.Path(path_type=Path, dir_okay=False), help="PEM file with the private key.")
@click.option(
    "--allowed-host",
    "names",
    metavar="NAME",
    multiple=True,
    help="A further name by which browsers reach the console, such as that of a proxy. Addresses, localhost and this "
    "machine's own name need none. May be repeated.",
)
@click.option(
    "--insecure",
    is_flag=True,
    envvar="LEASEHOLD_INSECURE",
    help="Allow http:// to and from other machines; for a console behind a proxy that speaks TLS.",
)
@click.pass_context
def console(
    context: click.Context,
    url: str | None,
    data: Path | None,
    host: str,
    port: int,
    certificate: Path | None,
    key: Path | None,
    names: tuple[str, ...],
    insecure: bool,
) -> int:
    """Serve the web console of a pool until Ctrl-C.

    Who logs in gives a token of the kind operator or submitter. The console needs the extra `leasehold[console]`.
    """
    if find_spec("nicegui") is None:
        raise LeaseholdError("the console needs NiceGUI: pip install 'leasehold[console]'")
    if (certificate is None) is not (key is None):
        raise BadInput("--key" if key is None else "--certificate", "a certificate and its key are given together")
    for option, path in (("--certificate", certificate), ("--key", key)):
        if path is not None and not path.is_file():
            raise BadInput(option, f"{path} is not there")
    if host not in LOOPBACK and certificate is None and not insecure:
        raise BadInput("--host", "tokens would come in clear from other machines; give --certificate, or --insecure")
    given = context.find_root().params.get("data")
    gateway = Caller(url=url, data=data or given, insecure=insecure).address()
    from bots.agent.isolation.privileges import hide_memory
    from bots.console import server

    hide_memory()  # it holds the tokens of all who are logged in
    return server.serve(
        gateway,
        server.Listen(host=host, port=port, certificate=certificate, key=key, names=names),
        on_ready=lambda address: click.echo(f"the console of {gateway} listens at {address}"),
    )
