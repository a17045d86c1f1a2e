"""Who a verified token stands for, and what it may do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from schema import limits
from schema.errors import Forbidden

#: An allowed value that stands for every value of its key, and for every label.
ANY_VALUE = "*"


class Kind(StrEnum):
    """What the holder of a token is."""

    SUBMITTER = "submitter"
    BOT = "bot"
    OPERATOR = "operator"


@dataclass(frozen=True)
class Principal:
    """The holder of a verified token, and what it may do.

    instance: the only instance it may touch; None = every one. For a bot: the only one it may serve.
    bot: the bot name it may use, exact or a prefix that ends in `*`; only bots have one.
    priority_ceiling: the most urgent (lowest) priority it may ask for; None = any.
    properties: the keys and values a bot may declare (`*` = any value); None = any.
    labels: those a bot may declare (`*` = any); pool: the only pool whose instances it may serve. A bot token that is
        limited in any way allows no labels and no pool but these; one without limits allows any.
    """

    kind: Kind
    id: str
    instance: str | None = None
    bot: str | None = None
    priority_ceiling: int | None = None
    properties: Mapping[str, Sequence[str]] | None = None
    labels: Sequence[str] | None = None
    pool: str | None = None

    @property
    def actor(self) -> str:
        """How events and the audit name this holder."""
        return f"{self.kind}:{self.id}"

    @property
    def is_operator(self) -> bool:
        return self.kind is Kind.OPERATOR

    @property
    def instances(self) -> list[str] | None:
        """The instances whose jobs it may see; None = all."""
        return None if self.instance is None else [self.instance]

    def may_use_instance(self, name: str) -> bool:
        """Whether it may submit to, and see, the instance `name`."""
        match self.kind:
            case Kind.OPERATOR:
                return True
            case Kind.SUBMITTER:
                return self.instance is None or self.instance == name
            case Kind.BOT:
                return False
            case _ as never:
                assert_never(never)

    def may_use_priority(self, priority: int) -> bool:
        """Whether `priority` (lower = more urgent) is not above its ceiling."""
        return self.priority_ceiling is None or priority >= self.priority_ceiling

    def may_be_bot(self, name: str) -> bool:
        """Whether it may speak for the bot `name`."""
        if self.kind is not Kind.BOT or self.bot is None:
            return False
        if self.bot.endswith("*"):
            return name.startswith(self.bot[:-1])
        return name == self.bot

    def check_bot(self, name: str) -> None:
        """Raise Forbidden unless it may speak for the bot `name`."""
        if not self.may_be_bot(name):
            raise Forbidden(f"bot: this token is not for a bot named '{limits.escaped(name, 80)}'")

    def check_session(
        self,
        name: str,
        *,
        instance: str | None,
        properties: Mapping[str, Sequence[str] | str],
        labels: Sequence[str] = (),
        pool: str | None = None,
    ) -> None:
        """Raise Forbidden unless it may open a session as bot `name` that declares all this."""
        self.check_bot(name)
        if self.instance is not None and instance != self.instance:
            raise Forbidden(f"instance: this token is for bots that serve only '{self.instance}'")
        if self.pool is not None and pool != self.pool:
            raise Forbidden(f"pool: this token is for bots that serve only the pool '{self.pool}'")
        limited = any(each is not None for each in (self.instance, self.properties, self.labels, self.pool))
        if not limited:
            return
        if pool != self.pool:
            raise Forbidden("pool: this token may not serve a pool")
        allowed = self.labels or ()
        for label in labels:
            if ANY_VALUE not in allowed and label not in allowed:
                raise Forbidden(f"labels: this token may not declare '{limits.escaped(label, 80)}'")
        self._check_properties(properties)

    def _check_properties(self, properties: Mapping[str, Sequence[str] | str]) -> None:
        if self.properties is None:
            return
        for key, given in properties.items():
            allowed = self.properties.get(key, ())
            values = [given] if isinstance(given, str) else given
            if ANY_VALUE not in allowed and not set(values) <= set(allowed):
                raise Forbidden(f"properties.{limits.escaped(key, 60)}: this token may not declare that value")
