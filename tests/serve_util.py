"""What the tests of the server and of web pages share: checks that are counted, and a server to
talk to. The first argument of each test is the program."""
import http.client, json, os, re, signal, subprocess, sys, threading, time

LLM = os.path.abspath(sys.argv[1])
TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = os.path.join(TOP, "models", "tales-q4_0.gguf")
counts = [0, 0] # checks failed, passed


def check(name, good, *seen):
    counts[bool(good)] += 1
    if not good:
        print("FAILED:", name, *(str(x)[:600] for x in seen), sep="\n  ", flush=True)
    return good


def finish():
    """Print the last line of a test; returns its exit status."""
    print("%d passed, %d failed" % (counts[1], counts[0]))
    return counts[0] > 0


class Server:
    """`llm serve` as a process. Its further lines on stderr, the log, are in `lines`."""

    def __init__(self, *options, model=MODEL, port=0, threads=os.environ.get("SERVE_THREADS", "2")):
        command = [LLM, "serve", "-m", model, "--port", str(port), "--device", "cpu", "-t",
                   str(threads), *options]
        # A fixed threshold returns the memory of each engine; glibc raises its own after a while.
        environment = dict(os.environ, MALLOC_MMAP_THRESHOLD_="131072")
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                        text=True, env=environment)
        self.lines = []
        first = self.process.stderr.readline()
        self.url, self.port = re.search(r"(http://[^ ]*?:(\d+))[, ]", first).groups()
        self.port = int(self.port)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stderr:
            self.lines.append(line)

    def request(self, method, path, body=None, headers={}):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, answer.headers, text

    def post(self, path, body, headers={}):
        status, _, text = self.request("POST", path, body, headers)
        return status, json.loads(text)

    def stream(self, path, body, headers={}):
        """The JSON of each chunk; the last one is the text [DONE]."""
        status, got, text = self.request("POST", path, {**body, "stream": True}, headers)
        if status != 200:
            return [json.loads(text)]
        lines = [x for x in text.split("\n") if x and not x.startswith(":")]
        assert all(x.startswith("data: ") for x in lines), text
        return [x[6:] if x == "data: [DONE]" else json.loads(x[6:]) for x in lines]

    def metrics(self):
        text = self.request("GET", "/metrics")[2]
        values = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[re.sub(r'engine="0",?|model_name="[^"]*",?', "", name)] = float(value)
        return values

    def idle(self, seconds=20):
        """Wait until nothing runs."""
        end = time.time() + seconds
        while time.time() < end:
            m = self.metrics()
            if m["vllm:num_requests_running{}"] == 0 and m["vllm:num_requests_waiting{}"] == 0:
                return True
            time.sleep(0.05)
        return False

    def memory(self):
        for line in open("/proc/%d/status" % self.process.pid):
            if line.startswith("VmRSS"):
                return int(line.split()[1])

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        return self.wait()

    def wait(self):
        try:
            status = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = "it did not end"
        self.reader.join(5)
        return status
