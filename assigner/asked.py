"""What a waiting job asks for beside a place, for `explain`: the gates of the cycle, each with its sentence."""

from sqlalchemy import Connection

from assigner import books, terms
from assigner.books import Rules
from assigner.gates import Judged
from schema import counters, gated
from schema.gates import Gate


def judge(connection: Connection, job_id: int, rules: Rules) -> list[Judged]:
    """The gates on what the job asks for; none if it asks for nothing but a place. What a checker would say, and for
    how long an assigner still waits, nobody else knows."""
    found = gated.job(connection, job_id)
    if found is None:
        return []
    head, now = found
    book = books.opened(connection, [head.queue], now=now, rules=rules)
    for name, amount in counters.held(connection, job_id).items():
        # Room is reserved for it, and what it takes is counted already.
        book.counter(name).used -= amount
    judged = []
    for gate in terms.GATES:
        why = gate.closed_to(head.queue, book) or gate.closed_for(head, book)
        judged.append(Judged(Gate(gate.name, "", gate.asks), why is None, why or gate.asks, {}))
    return judged
