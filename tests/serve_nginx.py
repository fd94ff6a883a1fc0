"""tests/serve_nginx.py LLM: two servers behind nginx with docs/examples/compose/nginx.conf. Checks
that streams are not buffered, that the requests of a conversation go to one server, and that the
other one takes over when it ends. Python's standard library is enough. Prints what failed, then
"N passed, N failed"."""
import http.client, json, os, re, shutil, signal, socket, subprocess, sys, tempfile, time

import serve_util
from serve_util import TOP, check, finish

CONF = os.path.join(TOP, "docs", "examples", "compose", "nginx.conf")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server(serve_util.Server):
    def __init__(self, port=0):
        super().__init__("--log", os.devnull, port=port, threads=1)

    def metric(self, name):
        return self.metrics()["vllm:%s{}" % name]

    def prompt_tokens(self):
        return self.metric("prompt_tokens_total")

    def hits(self):
        return self.metric("prefix_cache_hits_total")


class Nginx:
    def __init__(self, servers):
        self.port = free_port()
        self.folder = tempfile.mkdtemp(prefix="nginx.")
        conf = open(CONF).read()
        conf, listens = re.subn(r"listen 8080;", "listen 127.0.0.1:%d;" % self.port, conf)
        replaced = [listens]
        for k, s in enumerate(servers):
            conf, n = re.subn(r"127\.0\.0\.1:808%d" % (k + 1), "127.0.0.1:%d" % s.port, conf)
            replaced.append(n)
        check("the file names an address and two servers", replaced == [1, 1, 1], replaced)
        paths = "".join("%s_temp_path %s/%s;\n" % (kind, self.folder, kind)
                        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        with open(self.folder + "/main.conf", "w") as f:
            f.write("daemon off; worker_processes 1; pid %s/pid; error_log %s/log;\n"
                    "events { worker_connections 256; }\n"
                    "http { access_log off;\n%s%s\n}\n"
                    % (self.folder, self.folder, paths, conf))
        command = ["nginx", "-p", self.folder, "-e", self.folder + "/log", "-c",
                   self.folder + "/main.conf"]
        test = subprocess.run(command + ["-t"], capture_output=True, text=True)
        check("nginx accepts the file", test.returncode == 0 and "[warn]" not in test.stderr,
              test.stderr)
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                break
            except OSError:
                time.sleep(0.05)

    def open(self, path, body, headers={}):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        c.request("GET" if body is None else "POST", path, body and json.dumps(body),
                  {"Content-Type": "application/json", **headers})
        return c, c.getresponse()

    def request(self, path, body=None, headers={}):
        c, answer = self.open(path, body, headers)
        text = answer.read().decode()
        c.close()
        return answer.status, text

    def end(self):
        self.process.terminate()
        self.process.wait(30)
        shutil.rmtree(self.folder)


def chat(messages, **more):
    return {"messages": messages, "max_tokens": 4, "temperature": 0, **more}


def count(servers, action, of=Server.prompt_tokens):
    """Run the action. Returns what it added to a counter of each server."""
    before = [of(s) for s in servers]
    action()
    return [of(s) - b for s, b in zip(servers, before)]


def test_streams(nginx, servers):
    start = time.time()
    c, answer = nginx.open("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 600,
                                               "ignore_eos": True, "stream": True})
    times = []
    for line in answer:
        if line.startswith(b"data: "):
            times.append(time.time() - start)
    c.close()
    check("a stream of 600 tokens", len(times) > 300, len(times))
    check("the first chunk comes long before the last", times and times[0] < times[-1] / 4,
          times[:1], times[-1:])
    # A proxy that buffers delivers chunks in lumps.
    waits = [b - a for a, b in zip(times, times[1:])]
    check("chunks come one by one", waits and max(waits) < times[-1] / 4, max(waits, default=0))
    c, answer = nginx.open("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 900,
                                               "ignore_eos": True, "stream": True})
    answer.readline()
    answer.close() # http.client keeps the descriptor while either is open
    c.close()
    end = time.time() + 10
    while sum(s.metric("num_requests_running") for s in servers) and time.time() < end:
        time.sleep(0.02)
    check("a request ends when its client leaves", time.time() < end)


def test_conversations(nginx, servers):
    for how in "header", "body":
        used = [0, 0]
        for k in range(12):
            first = "Tell me tale number %d, in which a fox meets {a bear} \u2603. " % k * 4
            system = {"role": "system", "content": "You tell tales to children. " * 4}
            messages = [system, {"role": "user", "content": first}]
            headers = {"x-conversation": "tale-%d" % k} if how == "header" else {}
            nginx.request("/v1/chat/completions", chat(messages), headers)

            def more_turns():
                for turn in "Go on, please.", "And then?":
                    messages.extend([{"role": "assistant", "content": "The fox ran."},
                                     {"role": "user", "content": turn}])
                    status, text = nginx.request("/v1/chat/completions", chat(messages), headers)
                    assert status == 200, text
            hits = []
            tokens = count(servers, lambda: hits.extend(count(servers, more_turns, Server.hits)))
            at = 0 if tokens[0] else 1
            used[at] += 1
            check("%s %d: one server has the whole conversation" % (how, k), min(tokens) == 0,
                  tokens)
            check("%s %d: it finds most of the prompt in its prefix cache" % (how, k),
                  hits[at] > 0.6 * tokens[at] and hits[1 - at] == 0, hits, tokens)
        check("%s: both servers have conversations" % how, min(used) > 0, used)
    prompt = "One day, a little bear and a fox went to the river to look for fish. " * 4

    def prompts():
        for tail in "", "The end.", "It was cold.":
            nginx.request("/v1/completions", {"prompt": prompt + tail, "max_tokens": 2})
    tokens = count(servers, prompts)
    check("prompts with the same beginning go to one server", min(tokens) == 0, tokens)


def test_end(nginx, servers, how):
    """End a server: while nginx still sends requests to it, none may fail."""
    def conversation(k):
        return nginx.request("/v1/chat/completions", chat([{"role": "user", "content": "Hello."}]),
                             {"x-conversation": "c%d" % k})[0]
    name = how.name
    before = count(servers, lambda: [conversation(k) for k in range(12)])
    check("%s: both servers work" % name, min(before) > 0, before)
    streams = []
    if how == signal.SIGTERM: # a stream on each server ends in order, despite the signal
        for k in range(12):
            streams.append(nginx.open("/v1/completions", {
                "prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True},
                {"x-conversation": "c%d" % k}))
    servers[0].process.send_signal(how)
    statuses = [conversation(k) for k in range(12)]
    check("%s: the other server takes all requests" % name, statuses == [200] * 12, statuses)
    for c, answer in streams:
        lines = [x for x in answer.read().decode().split("\n") if x.startswith("data: ")]
        c.close()
        check("a stream of the ending server is complete", len(lines) > 100 and
              lines[-1] == "data: [DONE]", len(lines), lines[-1:])
    status = servers[0].wait()
    check("%s: exit status" % name, status == (0 if how == signal.SIGTERM else -how), status)
    check("%s: requests afterwards" % name, [conversation(k) for k in range(12)] == [200] * 12)
    servers[0] = Server(servers[0].port)
    end = time.time() + 20 # fail_timeout is 5 seconds
    while time.time() < end and servers[0].prompt_tokens() == 0:
        statuses = [conversation(k) for k in range(12)]
        time.sleep(0.2)
    check("%s: the server comes back" % name, servers[0].prompt_tokens() > 0 and
          statuses == [200] * 12, statuses)
    after = count(servers, lambda: [conversation(k) for k in range(12)])
    check("%s: with the conversations it had" % name, (after[0] > 0) and after == before, before,
          after)


servers = [Server(), Server()]
nginx = Nginx(servers)
try:
    check("health", nginx.request("/health")[0] == 200)
    check("no metrics through nginx", nginx.request("/metrics")[0] == 404)
    check("an error passes unchanged", nginx.request("/v1/completions", {"prompt": 7})[0] == 400)
    test_streams(nginx, servers)
    test_conversations(nginx, servers)
    test_end(nginx, servers, signal.SIGTERM)
    test_end(nginx, servers, signal.SIGKILL)
except Exception as e:
    check("no exception", False, repr(e))
    log = nginx.folder + "/log"
    print(open(log).read()[-2000:] if os.path.exists(log) else "no log of nginx")
finally:
    nginx.end()
    for s in servers:
        s.end()
sys.exit(finish())
