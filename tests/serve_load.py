#!/usr/bin/env python3
"""tests/serve_load.py URL [OPTIONS]: load for a server with OpenAI's API (`llm serve`, llama.cpp's
server, vLLM): so many clients at once, each with prompts of random token ids, streamed. Prints
tokens per second, and TTFT and the time between tokens as median and p99. Python's standard library
is enough. See "Serving" in docs/bench.md."""
import argparse, asyncio, json, random, resource, sys, time, urllib.parse

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("url", help="http://HOST:PORT")
options.add_argument("--clients", type=int, default=32, help="at once; default 32")
options.add_argument("--requests", type=int, help="default: one per client")
options.add_argument("--prompt", type=int, default=128, help="tokens of a prompt; default 128")
options.add_argument("--tokens", type=int, default=64, help="tokens to generate; default 64")
options.add_argument("--vocabulary", type=int, default=32000, help="ids go up to it; default 32000")
options.add_argument("--seed", type=int, default=1, help="of the prompts; default 1")
options.add_argument("--pid", type=int, help="process of the server, for its memory")
options.add_argument("--lines", metavar="FILE", help="write the requests for `llm batch` instead")
options.add_argument("--together", action="store_true",
                     help="wait until all connections are open before the first request")


def body_of(seed, o):
    ids = random.Random(seed)
    return {"prompt": [ids.randrange(300, o.vocabulary) for _ in range(o.prompt)],
            "max_tokens": o.tokens, "temperature": 0, "ignore_eos": True}


async def ask(reader, writer, place, body, result):
    """Send one request on an open connection, and read its stream to the end."""
    data = json.dumps({**body, "stream": True,
                       "stream_options": {"include_usage": True}}).encode()
    start = time.perf_counter()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n%s" % (place.netloc.encode(), len(data), data))
    status = await reader.readline()
    times, n = [], 0
    if b" 200 " not in status:
        raise RuntimeError(status)
    while True:
        line = await reader.readline()
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            if chunk.get("choices"):
                times.append(time.perf_counter())
            if chunk.get("usage"):
                n = chunk["usage"]["completion_tokens"]
        if not line or line.startswith(b"data: [DONE]"):
            break
    while line and line.strip() != b"0": # the last chunk of the body
        line = await reader.readline()
    await reader.readline()
    end = time.perf_counter()
    result["tokens"] += n
    result["ttft"].append(times[0] - start)
    result["between"] += [b - a for a, b in zip(times, times[1:])]
    result["whole"].append(end - start)


async def main(o):
    place = urllib.parse.urlsplit(o.url)
    result = {"tokens": 0, "failed": 0, "ttft": [], "between": [], "whole": []}
    waiting = [body_of(o.seed * 1000000 + i, o) for i in range(o.requests or o.clients)]
    gate = asyncio.Semaphore(0)
    opened = 0

    async def client():
        nonlocal opened
        reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
        opened += 1
        if o.together:
            if opened == o.clients:
                for _ in range(o.clients):
                    gate.release()
            await gate.acquire()
        while waiting:
            await ask(reader, writer, place, waiting.pop(0), result)
        writer.close()

    start = time.perf_counter()
    answers = await asyncio.gather(*(client() for _ in range(o.clients)), return_exceptions=True)
    seconds = time.perf_counter() - start
    for e in answers:
        if e:
            result["failed"] += 1
            print(repr(e), file=sys.stderr)

    def show(name, values):
        values = sorted(values) or [0]
        print("%s: median %.3f s, p99 %.3f s" % (name, values[len(values) // 2],
                                                 values[min(len(values) - 1,
                                                            int(0.99 * len(values)))]))

    print("%d requests in %.2f s, %d failed: %.1f tokens/s" %
          (len(result["whole"]), seconds, result["failed"], result["tokens"] / seconds))
    show("TTFT", result["ttft"])
    show("between tokens", result["between"])
    show("whole request", result["whole"])
    if o.pid:
        for line in open("/proc/%d/status" % o.pid):
            if line.startswith(("VmRSS", "VmHWM", "Rss")):
                print(line.strip())
    return result["failed"] > 0


o = options.parse_args()
if o.lines:
    with open(o.lines, "w") as f:
        for i in range(o.requests or o.clients):
            body = body_of(o.seed * 1000000 + i, o)
            f.write(json.dumps({"tokens": body["prompt"], "max_tokens": o.tokens, "temperature": 0,
                                "ignore_end": True}) + "\n")
    sys.exit()
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
sys.exit(asyncio.run(main(o)))
