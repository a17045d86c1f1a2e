"""Graphs at random end as their edges say, and many bots may end their nodes at once."""

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from schema.moves.graphs import SubmittedGraph
from tests.support.pool import Bot, Pool, completed, graph_of, layered, states, submitted, taken
from tests.support.race import Race

GRAPHS, NODES = 40, 14
ON_FAILURE = ("block", "run", "cancel")
Verdicts = dict[str, str]


def at_random(chance: random.Random, name: str) -> dict[str, Any]:
    """A graph in which every edge has a policy of its own, and a few are phantoms."""
    after = {
        node: [
            {"node": parent, "on_failure": chance.choice(ON_FAILURE)}
            for parent in chance.sample(range(1, node), chance.randint(0, min(3, node - 1)))
        ]
        for node in range(1, NODES + 1)
    }
    if chance.random() < 0.2:
        after[chance.randint(1, NODES)].append({"node": 99})
    request = graph_of(after, name=name)
    chance.shuffle(request["nodes"])
    return request


def expected(request: Mapping[str, Any], verdicts: Mapping[int, str]) -> dict[int, str]:
    """How every node must end, if its command ends like this when it runs."""
    found: dict[int, str] = {}
    for node in sorted(request["nodes"], key=lambda one: one["node"]):
        parents = [(found.get(parent["node"], "blocked"), parent.get("on_failure")) for parent in node["after"]]
        if any(state not in ("succeeded", "blocked") and policy == "cancel" for state, policy in parents):
            found[node["node"]] = "cancelled"
        elif any(state == "blocked" or (state != "succeeded" and policy != "run") for state, policy in parents):
            found[node["node"]] = "blocked"
        else:
            found[node["node"]] = verdicts[node["node"]]
    return found


def work(pool: Pool, bot: Bot, verdicts: Verdicts) -> None:
    """Run what comes until nothing does."""
    while offered := bot.take():
        bot.sync(*[completed(each, verdicts.get(each["job"], "succeeded")) for each in offered])
        pool.assigner(batch=200).run_once()


@pytest.mark.long
def test_graphs_at_random_end_as_their_edges_say(pool: Pool, chance: random.Random) -> None:
    requests = [at_random(chance, f"graph-{nth}") for nth in range(GRAPHS)]
    graphs: list[SubmittedGraph] = [taken(pool, request) for request in requests]
    wanted = [{node: chance.choice(["succeeded", "succeeded", "failed"]) for node in graph.jobs} for graph in graphs]
    verdicts = {graph.jobs[node]: end for graph, ends in zip(graphs, wanted, strict=True) for node, end in ends.items()}
    bot = pool.bot(capacity=100)
    pool.assigner(batch=200).run_once()
    work(pool, bot, verdicts)
    for request, graph, ends in zip(requests, graphs, wanted, strict=True):
        assert states(pool, graph) == expected(request, ends), request


def test_bots_that_end_nodes_of_one_graph_at_once_neither_deadlock_nor_lose_a_count(pool: Pool, race: Race) -> None:
    graph = submitted(pool, layered(400, parents=5, chance=pool.chance), on_failure="run")
    bots = [pool.bot(f"bot-{nth}", capacity=10) for nth in range(4)]
    failing = {job: "failed" for node, job in graph.jobs.items() if node % 7 == 0}

    def until_over(bot: Bot) -> None:
        while any(state in ("blocked", "queued", "leased", "running") for state in states(pool, graph).values()):
            work(pool, bot, failing)
            pool.upkeep().run_once()
            pool.assigner(batch=200).run_once()

    with ThreadPoolExecutor(len(bots)) as threads:
        for done in [threads.submit(until_over, bot) for bot in bots]:
            done.result(timeout=120)
    assert set(states(pool, graph).values()) == {"succeeded", "failed"}
    assert pool.row("SELECT count(*) FROM job_events WHERE move = 'unblock'")[0] == 350
    assert race.errors == []
