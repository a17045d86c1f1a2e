"""The console script `leasehold`: the composition root, the one module that imports both `assigner` and `bots`.

One module because no other may import both: what starts a gateway needs parts of both.
"""

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import click
from click.shell_completion import CompletionItem
from leasehold.errors import BadInput

from assigner.cli import completion, errors, names
from schema import clock, gc_tuning
from schema.readable import Group, tell

S = TypeVar("S", bound="BaseModel")

if TYPE_CHECKING:
    from fastapi import FastAPI
    from pydantic import BaseModel

    from assigner.process.local_pool import LocalBot, LocalPool
    from assigner.process.policies import InForce
    from assigner.settings import Installation, PoolSettings
    from assigner.simulation.past import Past
    from assigner.simulation.replay import BotsOf, How, Plan
    from bots.agent.agent import AgentSettings
    from bots.farm.command import Parts as PartsOfFarm
    from bots.farm.execution.jobs import Submit
    from bots.simulation.bots import SimulatedBots
    from bots.sync.fetch import FetchSettings
    from bots.sync.settle import SyncService
    from schema.postgres.engine import Database
    from schema.timing import Timing

# To look for plug-ins of pydantic, which extend no model of ours, takes a tenth of the time of a caller's command.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

#: Where the configuration file is searched if neither option nor environment names it.
CONFIG_PLACES = (Path("leasehold.toml"), Path("/etc/leasehold/leasehold.toml"))

#: The commands that read the configuration; all others call a gateway.
LOCAL = frozenset({"up", "assign", "config", "db", "token", "demo", "gateway", "bot", "simulate", "tune", "farm"})

#: Sections of the configuration that a gateway shows to operators.
TOLD_BY_GATEWAYS = ("gateway", "timing", "fetch", "quotas", "ordering", "estimates", "service_levels")
#: Seconds that the loop which writes a gateway's signs of life may take to end.
STOP_WITHIN = 5.0

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


@cache
def sections() -> "type[PoolSettings]":
    """Return the model of the whole configuration file, with the sections of `assigner` and of `bots`."""
    from pydantic import Field

    from assigner.settings import PoolSettings
    from bots.agent.agent import AgentSettings
    from bots.agent.isolation import job_accounts
    from bots.farm.settings import FarmSettings
    from bots.gateway.identity.settings import IdentitySettings
    from bots.gateway.settings import GatewaySettings
    from bots.sync.fetch import FetchSettings

    class Settings(PoolSettings):
        fetch: FetchSettings = Field(default_factory=FetchSettings)
        gateway: GatewaySettings = Field(default_factory=GatewaySettings)
        identity: IdentitySettings = Field(default_factory=IdentitySettings)
        bot: AgentSettings = Field(default_factory=AgentSettings)
        farm: FarmSettings = Field(default_factory=FarmSettings)

        @property
        def job_reach(self) -> str | None:
            return job_accounts.reach(self.bot.job_user, boxed=self.bot.sandbox != "none")

        @property
        def task_reach(self) -> str | None:
            return job_accounts.reach(self.bot.job_user or job_accounts.AGENT, boxed=False, what="tasks")

        def seen_by_tasks(self, environ: Mapping[str, str]) -> Mapping[str, str]:
            seen = {*self.bot.env_allow, "PYTHONPATH"}
            return {name: value for name, value in environ.items() if name in seen}

    return Settings


class Root(Group):
    """The root group, which imports modules only for the command that runs.

    A `leasehold submit` in a shell loop must start fast, so it must import neither the database modules nor those of
    other commands; nor may `--help`, completion and the refusal of an unknown command. So the names, places and help
    texts of commands are in a table that is made from them; see `completion`. Operators' commands call a gateway, with
    the same options as callers' commands.
    """

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted({*super().list_commands(context), *completion.names()})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if completion.is_asked():
            return completion.command(name)
        if (own := super().get_command(context, name)) is not None:
            return own
        entry = completion.entry(name)
        if entry is None:
            return None
        if entry["place"] is None:
            return self._of_operators(name)
        module, _, attribute = entry["place"].partition(":")
        found = getattr(import_module(module), attribute)
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = self._described(ctx)
        for heading, group in names.GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, found[name].get_short_help_str(300)) for name in group])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        instead = names.instead(args)
        if instead is not None and not ctx.resilient_parsing:
            raise click.UsageError(instead, ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        described = self._described(ctx).items()
        found = [CompletionItem(name, help=each.get_short_help_str()) for name, each in described]
        return [item for item in found if item.value.startswith(incomplete)] + click.Command.shell_complete(
            self, ctx, incomplete
        )

    def _described(self, context: click.Context) -> dict[str, click.Command]:
        """Return commands that only have a name and a help text, in the order of `--help`."""
        entries = {name: completion.entry(name) for name in self.list_commands(context)}
        return {
            name: self.commands[name] if entry is None else click.Command(name, help=entry["help"])
            for name, entry in entries.items()
        }

    @staticmethod
    def _of_operators(name: str) -> click.Command | None:
        from assigner.cli import operations
        from bots.cli.caller import caller_options

        return operations.command(name, caller_options)


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="LEASEHOLD_DATA",
    help="Data directory [env LEASEHOLD_DATA; default: ~/.local/share/leasehold, for root /var/lib/leasehold].",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="LEASEHOLD_CONFIG",
    help="Configuration [env LEASEHOLD_CONFIG; default: ./leasehold.toml, /etc/leasehold/leasehold.toml, if there].",
)
@click.version_option(package_name="leasehold")
@click.pass_context
def cli(context: click.Context, data: Path | None, config: Path | None) -> None:
    """A worker pool whose only moving part is PostgreSQL."""
    if context.invoked_subcommand not in LOCAL:
        # The command calls a gateway, which reads the configuration. One of them reads a file that is not in force.
        context.meta[names.SECTIONS] = sections
        return
    from leasehold.credentials import default_data

    from assigner import logs
    from assigner import settings as settings_assigner
    from bots.agent.isolation.privileges import hide_memory

    hide_memory()
    logs.to_stderr("ERROR")
    found = config or next((place for place in CONFIG_PLACES if place.is_file()), None)
    context.obj = settings_assigner.Installation(
        data=(data or default_data()).absolute(),
        config=found,
        sections=sections(),
        environ=os.environ,
        at_home=data is None,
    )
    if context.invoked_subcommand == "farm":
        from bots.farm.command import PARTS

        context.meta[PARTS] = _parts_of_farm(context, context.obj)


@cli.command(name="demo")
@click.option("--jobs", type=click.IntRange(min=1), help="Largest number of jobs [one for each module].")
@click.option("--assigners", type=click.IntRange(1, 100), default=2, show_default=True, help="Assigner processes.")
@click.option("--keep", is_flag=True, help="Leave the pool up afterwards, until Ctrl-C.")
@as_json
@click.pass_obj
@click.pass_context
def demo_command(
    context: click.Context, installation: "Installation", jobs: int | None, assigners: int, keep: bool, as_json: bool
) -> None:
    """Compile Python's standard library on a pool of its own and check every result.

    It runs in a temporary directory and without a configuration file, unless --data or --config say otherwise.
    """
    from assigner.process.local_pool import LocalBot
    from bots.demo import demo

    wanted = [
        LocalBot(name=bot.name, capacity=bot.capacity, priority=bot.priority, properties=bot.properties)
        for bot in demo.bots_wanted()
    ]
    with ExitStack() as stack:
        environ = {"LEASEHOLD_QUOTAS_PREEMPTION_DELAY": f"{demo.PREEMPTION_DELAY}"}
        pool = stack.enter_context(_demo_pool(context, installation, environ, bots=wanted, assigners=assigners))
        own = demo.Pool(pool.url, pool.token, pool.data)
        demo.run(own, demo.Options(jobs=jobs, json=as_json, keep=keep), chance=random.SystemRandom())


@contextmanager
def _demo_pool(
    context: click.Context,
    installation: "Installation",
    environ: Mapping[str, str],
    *,
    bots: Sequence["LocalBot"],
    **pool: Any,
) -> Iterator["LocalPool"]:
    """Run a pool in a temporary directory and without a configuration, unless options say otherwise; it is kept up.

    environ: settings that hold unless a configuration is given.
    """
    from assigner.loops import Loop
    from assigner.process.local_pool import local_pool
    from bots.demo import workload
    from schema.postgres import embedded

    chance = random.SystemRandom()
    with ExitStack() as stack:
        if not _given(context, "data"):
            data = embedded.scratch("leasehold-demo-")
            stack.callback(shutil.rmtree, data, ignore_errors=True)
            installation = replace(installation, data=data)
        if not _given(context, "config"):
            environ = {**installation.environ, **environ}
            if not workload.runs_under_other_accounts():
                tell(
                    f"other accounts cannot run {sys.executable}, so the demo's jobs run as root "
                    "(LEASEHOLD_BOT_JOB_USER=agent)"
                )
                environ = {"LEASEHOLD_BOT_JOB_USER": "agent", **environ}
            installation = replace(installation, config=None, environ=environ)
        found = stack.enter_context(local_pool(installation, bots=bots, report=tell, chance=chance, port=0, **pool))
        keeper = Loop("pool", found.run_once, chance=random.Random(chance.getrandbits(64)))
        keeper.start()
        stack.callback(keeper.stop)
        yield found


def _duration(context: click.Context, option: click.Parameter, value: str) -> float | None:
    from assigner.cli import output

    return output.duration(context, option, value)


_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_OF_A_PAST = (
    click.option("--since", metavar="DURATION", callback=_duration, help="Take so much of the past. By default 24h."),
    click.option(
        "--trace", type=_FILE, help="Take a recorded load: SWF, Google 2019, Alibaba 2018 or openb, also .gz."
    ),
    click.option(
        "--span", metavar="DURATION", callback=_duration, help="Only so much of the trace, from its first job."
    ),
    click.option("--generate", type=_FILE, help="Take the load that this file describes."),
    click.option("--seed", type=int, default=1, show_default=True, help="What chance decides follows from it."),
    click.option(
        "--step",
        metavar="DURATION",
        callback=_duration,
        help="What happens within it is done together. By default at most 5 s.",
    ),
)


def _of_a_past(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that simulates the options that say what happens and how it is replayed."""
    for option in reversed(_OF_A_PAST):
        command = option(command)
    return command


@cli.command(name="simulate")
@_of_a_past
@click.option(
    "--from-now",
    metavar="DURATION",
    callback=_duration,
    help="Go on with what waits and runs now, and arrivals as lately.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A configuration to try on it, or the number of a version of the policy; may be given several times.",
)
@click.option(
    "--bots", metavar="FILE|±N[:NAME]", help="The bots to try: those of a file, or N more or fewer, like bot NAME."
)
@click.option("--shake", type=click.IntRange(0, 100), default=0, help="Replay so often with shaken arrivals and times.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the report with charts there.")
@click.option("--title", metavar="TEXT", help="Keep the report in the pool, so that the console shows it.")
@as_json
@click.pass_obj
def simulate_command(installation: "Installation", /, as_json: bool, **options: Any) -> None:
    """Let the pool's past happen again, as it is configured and under other configurations, and compare.

    The jobs arrive on a private pool at the times at which they arrived, and run as long as they ran. Its clock
    is virtual: it jumps from one event to the next. The live pool is read once, and nothing is written there, but
    the report with --title.
    """
    from assigner.cli.simulations import simulate

    simulate.run(installation, simulate.Asked(**options), bots_of=_bots_of, as_json=as_json)


@cli.command(name="tune")
@_of_a_past
@click.option("--bots", type=click.Path(exists=True, dir_okay=False), help="With --trace: a file of the bots.")
@click.option(
    "--objective", default="p95_wait", show_default=True, help="What to better, such as p95_wait:class=serious."
)
@click.option("--keep", "keeps", multiple=True, help="What must hold, such as 'jain>=0.9' or 'evictions<=now'.")
@click.option("--parameter", "parameters", multiple=True, help="Only parameters whose names have this word in them.")
@click.option("--quotas", "with_quotas", is_flag=True, help="Also change quotas.")
@click.option("--candidates", type=click.IntRange(3, 500), default=18, show_default=True, help="Policies to draw.")
@click.option("--shake", type=click.IntRange(1, 100), default=5, show_default=True, help="Shaken replays at the end.")
@as_json
@click.pass_obj
def tune_command(installation: "Installation", /, as_json: bool, **options: Any) -> int:
    """Search for better values of what decides, by simulations of the pool's past.

    Candidates are chosen by the first four fifths of the past and judged by the last fifth. The proposal is kept as a
    draft version of the policy, which is not in force. Exit code 2: nothing is proposed.
    """
    from assigner.cli.simulations import simulate, tune
    from assigner.simulation.tuning import Wish, term

    wish = Wish(
        term("--objective", options["objective"], bounded=False),
        [term("--keep", text, bounded=True) for text in options["keeps"]],
    )
    if options["bots"] is not None and options["trace"] is None:
        raise BadInput("--bots", "says what ran a trace: give --trace")
    own = ("since", "trace", "span", "generate", "bots", "seed", "step")
    asked = simulate.Asked(**{name: options[name] for name in own})
    search = tune.Search(wish, options["parameters"], options["with_quotas"], options["candidates"], options["shake"])
    return tune.run(installation, asked, search, bots_of=_bots_of, as_json=as_json)


def _bots_of(settings: "PoolSettings") -> "BotsOf":
    """Return what makes simulated bots, with the fetches that the configuration says."""
    from bots.sync.fetch import FetchSettings

    return partial(_bots_of_a_past, fetch=getattr(settings, "fetch", None) or FetchSettings())


def _bots_of_a_past(
    database: "Database",
    *,
    settings: "PoolSettings",
    past: "Past",
    how: "How",
    seed: int,
    step: float,
    plan: "Plan",
    fetch: "FetchSettings",
) -> "SimulatedBots":
    """Make simulated bots like those of the past, whose sessions begin and end as they did."""
    from bots.protocol import OpenSession, Work
    from bots.simulation.bots import Run, simulated_bots
    from schema.fleet.kinds import TASK

    def runs(work: Work, _chance: random.Random) -> Run:
        attempt = how((work.payload or {})["command"], work.attempt)
        return Run(attempt.seconds, attempt.verdict)

    made = simulated_bots(
        database,
        timing=settings.timing,
        fetch=fetch,
        cooldown=settings.quotas.of_evictions,
        runs=runs,
        seed=seed,
        step=step,
    )
    openings = [
        (
            bot,
            OpenSession(
                bot=bot.name,
                capacity=bot.capacity,
                priority=bot.priority,
                properties={key: value for key, value in bot.properties.items() if key != TASK},
                tasks=bot.properties.get(TASK),
                exclusive=list(bot.exclusive),
                instance=bot.instance,
                pool=bot.pool,
                labels=list(bot.labels),
            ),
        )
        for bot in past.bots
    ]
    present = [opening for bot, opening in openings if bot.opened <= past.since]
    if present:
        made.open(*present)
    for bot, opening in openings:
        if bot.ended is not None:
            plan(bot.ended, partial(made.leave, bot.name))
        if bot.opened > past.since:
            plan(bot.opened, partial(made.open, opening))
    return made


def _given(context: click.Context, name: str) -> bool:
    """True if a global option was given on the command line, not by the environment."""
    return context.find_root().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


@cli.command(name="gateway")
@click.pass_obj
def gateway_command(installation: "Installation") -> int:
    """Run one gateway."""
    import structlog

    from assigner import logs
    from assigner.api import backlog
    from assigner.api import jobs as job_routes
    from assigner.estimation import RunTimeAdvice
    from assigner.loops import exit_within
    from assigner.process.policies import Follower
    from bots.gateway import app as app_gateway
    from bots.gateway import server
    from bots.gateway.identity import verifier
    from schema.policy import priority_classes
    from schema.postgres.notify import Wakeups

    settings: Any = installation.settings
    logs.to_stderr(settings.log.level.upper(), settings.log.format)
    factor: float | None = settings.estimates.advice_factor

    class Server(server.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.stopped_by is None:
                exit_within(server.SHUTDOWN_SECONDS + STOP_WITHIN, 1)
            super().handle_exit(sig, frame)

    def on_ready(url: str) -> None:
        _keep(installation.data / "gateway.url", url)
        structlog.get_logger().info("gateway listens", url=url, using=installation.described)
        _tell_operators(installation, database, app, stack, url=url)

    with installation.ready_database("gateway") as database, ExitStack() as stack:
        database.run(lambda connection: priority_classes.require_default(connection, settings.service_levels))
        wakeups = Wakeups(database)
        wakeups.start()
        stack.callback(wakeups.stop)
        sync_service = _sync_service(database, settings, settings.timing, stack)
        standby = stack.enter_context(installation.standby_reads("gateway", database))
        app = app_gateway.build(
            database,
            sync_service,
            settings.gateway,
            timing=settings.timing,
            wakeups=wakeups,
            routers=[*job_routes.ROUTERS, backlog.router],
            estimate=settings.estimates.estimate,
            default_level=settings.service_levels.default,
            advise=None if factor is None else RunTimeAdvice(database, factor).advise,
            standby=standby,
            signed=verifier(settings.identity),
        )
        app.state.policy = Follower(database, settings, partial(_work_by, app, sync_service))
        app.state.policy.run_once()
        serving = Server(app, settings.gateway, on_ready=on_ready)
        serving.serve_until_stopped()
    structlog.get_logger().info("gateway stopped")
    return 130 if serving.stopped_by is signal.SIGINT else 0


def _parts_of_farm(context: click.Context, installation: "Installation") -> "PartsOfFarm":
    """Return what the commands of the farm door need of the assigner."""
    from assigner import logs
    from assigner.api import submission
    from assigner.explain.answer import why_it_waited
    from bots.farm.command import Parts

    def submit(database: "Database") -> "Submit":
        return partial(submission.submit_completed, database, installation.settings.estimates.estimate)

    def demo_pool(bots: Sequence[str]) -> AbstractContextManager["LocalPool"]:
        from assigner.cli import up

        wanted = [up.farm_bot(name, capacity=2) for name in bots]
        return _demo_pool(context, installation, {}, bots=wanted, assigners=1, farm=0)

    def sync_service(database: "Database", timing: "Timing", stack: ExitStack) -> "SyncService":
        return _followed(database, installation.settings, timing, stack)

    return Parts(
        log_to_stderr=logs.to_stderr,
        overridden=_overridden,
        submit=submit,
        why=why_it_waited,
        sync_service=sync_service,
        keep=_keep,
        demo_pool=demo_pool,
    )


def _followed(database: "Database", settings: Any, timing: "Timing", stack: ExitStack) -> "SyncService":
    """Return a service that answers calls of bots, and works by the policy in force until the stack closes."""
    from assigner.loops import Loop
    from assigner.process.policies import Follower

    service = _sync_service(database, settings, timing, stack)

    follower = Follower(database, settings, partial(_settle_by, service))
    follower.run_once()
    loop = Loop("policy", follower.run_once, chance=random.Random())
    stack.callback(loop.stop, STOP_WITHIN)
    loop.start()
    return service


def _settle_by(service: "SyncService", policy: "InForce") -> None:
    """Let the service answer calls of bots by this version of the policy."""
    now: Any = policy.settings
    service.reconfigure(now.fetch, now.quotas.of_evictions, policy=policy.version)


def _work_by(app: "FastAPI", sync_service: "SyncService", policy: "InForce") -> None:
    """Let the gateway work by this version of the policy."""
    from assigner.explain.planned import Planning
    from assigner.process.threads import rules_from

    now: Any = policy.settings
    _settle_by(sync_service, policy)
    app.state.rules = rules_from(now)
    app.state.planning = Planning(tuple(now.assigners), now.quotas, app.state.rules)
    app.state.metrics.policy.set(policy.version or 0)


def _keep(path: Path, url: str) -> None:
    from assigner.process.local_pool import write_file

    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, url + "\n", mode=0o644)


def _tell_operators(
    installation: "Installation", database: "Database", app: "FastAPI", stack: ExitStack, *, url: str
) -> None:
    """Keep the database's row of the gateway that listens at `url` up to date until the stack closes."""
    from assigner.config.loading import masked
    from assigner.loops import Loop, standing
    from bots.gateway.presence import GatewayPresence
    from schema.tenancy.processes import Configuration

    file = None if installation.config is None else str(installation.config.absolute())

    def configuration() -> Configuration:
        policy = app.state.policy.policy
        shown = masked(policy.settings)
        return Configuration(file, {each: shown[each] for each in TOLD_BY_GATEWAYS}, policy.error, policy.version)

    presence = GatewayPresence(database, app.state.metrics, url=url, configuration=configuration(), now=clock.monotonic)
    stack.callback(presence.end)
    app.state.standing = standing
    telling = Loop("presence", presence.run_once, chance=random.Random())

    def follow_policy() -> float:
        before = app.state.policy.policy
        delay: float = app.state.policy.run_once()
        if app.state.policy.policy is not before:
            presence.configured(configuration())
            telling.wake()
        return delay

    loops = [telling, Loop("policy", follow_policy, chance=random.Random())]
    if app.state.standby is not None:
        loops.append(Loop("standby", app.state.standby.run_once, chance=random.Random()))
    for loop in loops:
        stack.callback(loop.stop, STOP_WITHIN)
        loop.start()


def _sync_service(database: "Database", settings: Any, timing: "Timing", stack: ExitStack) -> "SyncService":
    """Return the service that answers the calls of bots. Tracing spans that wait are sent when the stack closes."""
    from bots.sync.settle import SyncService
    from schema.diagnostics.tracing import AttemptTracer

    tracer = AttemptTracer.to_collector(settings.tracing)
    if tracer is not None:
        stack.callback(tracer.close)
    return SyncService(
        database,
        timing=timing,
        fetch=settings.fetch,
        now=clock.monotonic,
        cooldown=settings.quotas.of_evictions,
        tracer=tracer,
    )


def _units(_context: click.Context, option: click.Parameter, value: str | None) -> int | str | None:
    """Parse a number, or the word `auto`."""
    if value is None or value == "auto":
        return value
    found: int = click.INT(value, option)
    return found


@cli.command(name="bot")
@click.option("--name", metavar="NAME", help="Name of the bot; a new session ends an older one with this name.")
@click.option("--app", metavar="MODULE:POOL", help="Run the tasks of this pool in warm processes, and nothing else.")
@click.option("--concurrency", type=int, metavar="N", help="With --app: how many tasks run at once.")
@click.option("--max-calls", type=int, metavar="N", help="With --app: replace a process after so many calls.")
@click.option(
    "--max-memory",
    "max_memory_mib",
    type=int,
    metavar="MIB",
    help="With --app: replace a process that holds so much memory.",
)
@click.option("--max-age", type=float, metavar="SECONDS", help="With --app: replace a process that is so old.")
@click.option("--capacity", callback=_units, metavar="UNITS", help="Units of work that it takes at once, or auto.")
@click.option("--priority", type=int, help="Lower = preferred by assigners.")
@click.option(
    "--resource",
    "resources",
    multiple=True,
    metavar="KIND=AMOUNT",
    help="Amount of a resource that the bot has; repeatable.",
)
@click.option(
    "--property", "properties", multiple=True, metavar="KEY=VALUE", help="Property that the bot offers; repeatable."
)
@click.option(
    "--exclusive",
    multiple=True,
    metavar="KEY",
    help="Property that the bot keeps for jobs that ask for it; repeatable.",
)
@click.option("--instance", metavar="NAME", help="Serve only this instance.")
@click.option("--pool", metavar="NAME", help="Serve the instances of this pool.")
@click.option("--label", "labels", multiple=True, metavar="TEXT", help="Label, which decides the cohort; repeatable.")
@click.option("--url", metavar="URL", help="The gateway [env LEASEHOLD_URL; default: <data>/gateway.url].")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File with the bot's token, mode 600 [env LEASEHOLD_TOKEN holds a token; default: <data>/bot.token].",
)
@click.option("--insecure", is_flag=True, help="Allow http:// to another machine.")
@click.pass_obj
def bot_command(
    installation: "Installation", /, url: str | None, token_file: Path | None, insecure: bool, **given: Any
) -> int:
    """Run one bot. The options override the [bot] section of the configuration."""
    from assigner import logs
    from assigner.cli.operator import pairs
    from bots.agent.agent import Agent
    from bots.cli import caller, options
    from schema.validation import normal_properties

    logs.to_stderr(installation.settings.log.level.upper(), installation.settings.log.format)
    settings: AgentSettings = cast(Any, installation.settings).bot
    if given["properties"]:
        given["properties"] = normal_properties("--property", pairs(given["properties"], option="--property"))
    if given["resources"]:
        given["resources"] = options.amounts(given["resources"])
    if given["capacity"] is not None:
        given["auto_capacity"] = given["capacity"] == "auto"
        given["capacity"] = None if given["auto_capacity"] else given["capacity"]
    counted = _count_tasks(settings, given)
    settings = _overridden(settings, {key: value for key, value in given.items() if value not in (None, ())}, **counted)
    if settings.sandbox != "none":
        # The data directory holds tokens and the socket of a private server.
        settings = settings.model_copy(update={"sandbox_hide": (*settings.sandbox_hide, installation.data)})
    if token_file is None and "LEASEHOLD_TOKEN" not in installation.environ:
        token_file = installation.data / "bot.token"
    address = url or installation.environ.get("LEASEHOLD_URL") or settings.url
    who = caller.Caller(url=address, token_file=token_file, data=installation.data, insecure=insecure)
    agent = Agent(settings, who.address(), who.token(), adopt=True)
    gc_tuning.collect_as_usual()
    return agent.run()


def _count_tasks(settings: "AgentSettings", given: dict[str, Any]) -> dict[str, str]:
    """Take the number of tasks that run at once as the capacity; return the option that gave it, by the setting.

    Raises BadInput if that contradicts other options.
    """
    concurrency = given.pop("concurrency")
    if concurrency is None:
        return {}
    if given["app"] is None and settings.app is None:
        raise BadInput("--concurrency", "means nothing without --app")
    if given["capacity"] is not None or given.get("auto_capacity"):
        raise BadInput("--concurrency", "means the same as --capacity: give one of them")
    given |= {"capacity": concurrency, "auto_capacity": False}
    return {"capacity": "concurrency"}


def _overridden(settings: S, given: Mapping[str, Any], **options: str) -> S:
    """Return the settings with `given` in place of their own. options: by setting, its option if that has another name.

    Raises BadInput.
    """
    from pydantic import ValidationError

    from schema.fields import plain

    try:
        return type(settings).model_validate({**settings.model_dump(), **given})
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        field = (
            {"labels": "label", "resources": "resource", "max_memory_mib": "max-memory", **options}.get(
                str(details["loc"][0]), str(details["loc"][0]).replace("_", "-")
            )
            if details["loc"]
            else next((name.replace("_", "-") for name in given if name in details["msg"].split()), "pool")
        )
        raise BadInput(f"--{field}", plain(details["msg"]).replace("input should", "must")) from None


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(143)


def main() -> None:
    """The console script."""
    errors.open_streams()
    if "LEASEHOLD_PARENT" in os.environ:
        from assigner.process.children import follow_parent

        follow_parent()
    signal.signal(signal.SIGTERM, _terminated)
    gc_tuning.collect_rarely_at_start()
    sys.exit(errors.run(cli, sys.argv[1:]))


if __name__ == "__main__":
    main()
