"""A child for the pool's tests: does what the job says, hanging and dying included."""

import json
import os
import resource
import signal
import sys
import time


def main():
    limit = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def say(**message):
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    say(ready=True)
    for line in sys.stdin:
        job = json.loads(line)
        say(stage="prediction")
        match job["do"]:
            case "echo":
                say(result=[job["value"], os.getpid()])
            case "sleep":
                time.sleep(job["value"])
                say(result=None)
            case "spin":
                while True:
                    pass
            case "memory":
                try:
                    bytearray(1 << 33)
                except MemoryError:
                    say(error="out of memory")
            case "die":
                os._exit(7)
            case "noise":
                sys.stdout.write("not json\n")
                sys.stdout.flush()
            case "flood":
                sys.stdout.write("x" * (4 << 20))
                sys.stdout.flush()
            case "deep":
                sys.stdout.write("[" * 100_000 + "\n")
                sys.stdout.flush()
            case "list":
                sys.stdout.write("[1]\n")
                sys.stdout.flush()
            case "bytes":
                sys.stdout.buffer.write(b"\xff\xfe\x00\n")
                sys.stdout.flush()
            case "empty":
                say()
            case "twice":
                say(result="one")
                say(result="two")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
