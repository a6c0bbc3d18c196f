import os
import subprocess
import sys

PRINTING = "from megatron_patches.__main__ import {0}; {0}(); print('a', 1); print('b')"


def test_unbuffered_ranks_write_each_line_at_once() -> None:
    # In a pipe of packets, a read returns the bytes of a single write.
    reader, writer = os.pipe2(os.O_DIRECT)
    program = PRINTING.format("write_whole_lines")
    subprocess.run((sys.executable, "-u", "-c", program), stdout=writer, check=True)
    assert [os.read(reader, 100), os.read(reader, 100)] == [b"a 1\n", b"b\n"]
    os.close(reader)
    os.close(writer)
