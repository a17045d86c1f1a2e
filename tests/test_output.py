"""The output that waits to be sent."""

import base64

from bots.output import CHUNK_BYTES, Output


def test_output_is_cut_into_chunks_whose_offsets_go_on_where_the_gateway_has_it() -> None:
    output = Output(cap=CHUNK_BYTES + 10)
    output.write(b"a" * CHUNK_BYTES)
    output.write(b"b" * 20)
    pending = output.pending()
    assert [(chunk.start, len(base64.b64decode(chunk.data))) for chunk in pending.chunks] == [
        (0, CHUNK_BYTES),
        (CHUNK_BYTES, 10),
    ]
    output.sent(CHUNK_BYTES + 3)
    output.sent(5)
    assert [chunk.start for chunk in output.pending().chunks] == [CHUNK_BYTES + 3]
    assert (output.unsent, output.written, output.truncated) == (7, CHUNK_BYTES + 20, True)
