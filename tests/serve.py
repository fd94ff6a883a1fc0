"""tests/serve.py LLM [SERVER_COMMAND_PREFIX...]: the server, from outside: endpoints, streams, the
same tokens as `llm run`, disconnected clients, overload, attacks, an orderly end, metrics. Python's
standard library is enough. Prints what failed, then "N passed, N failed"."""
import concurrent.futures, http.client, json, os, random, re, signal, socket, struct, subprocess
import sys, tempfile, threading, time

from serve_util import LLM, MODEL, TOP, Server, check, finish


def text_of(chunks):
    return "".join(c["choices"][0]["text"] for c in chunks[:-1] if c["choices"])


def run(prompt, seed, n, *options):
    """The text and tokens that the command generates."""
    out = subprocess.run([LLM, "run", "-m", MODEL, "--device", "cpu", "--json", "-t",
                          os.environ.get("SERVE_THREADS", "2"), "--seed", str(seed),
                          "-n", str(n), *options, prompt], capture_output=True, text=True).stdout
    return json.loads(out)["samples"]


def test_endpoints(s):
    status, headers, text = s.request("GET", "/v1/models", headers={"x-request-id": "abc-1"})
    model = json.loads(text)["data"][0]
    check("models", status == 200 and model["id"] == "tales-q4_0" and model["root"] == MODEL, text)
    check("the request's id comes back", headers["x-request-id"] == "abc-1", headers)
    check("one model", s.request("GET", "/v1/models/tales-q4_0")[0] == 200)
    check("another model", s.request("GET", "/v1/models/other")[0] == 404)
    check("health", s.request("GET", "/health")[0] == 200)
    check("version", "version" in json.loads(s.request("GET", "/version")[2]))
    status, body = s.post("/tokenize", {"prompt": "Once upon a time"})
    check("tokenize", status == 200 and body["count"] == len(body["tokens"]) == 5, body)
    status, body = s.post("/tokenize", {"prompt": "Once", "add_special_tokens": False})
    check("tokenize without BOS", body["count"] == 1, body)
    status, body = s.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})
    check("tokenize a conversation", status == 200 and body["count"] > 5, body)
    ids = s.post("/tokenize", {"prompt": "A fox, a wolf", "add_special_tokens": False})[1]["tokens"]
    check("detokenize", s.post("/detokenize", {"tokens": ids})[1] == {"prompt": "A fox, a wolf"})
    check("nothing there", s.request("GET", "/nothing")[0] == 404)
    check("wrong method", s.request("GET", "/v1/completions")[0] == 405)
    check("HEAD", s.request("HEAD", "/health")[0] == 200)


def test_errors(s):
    def refused(body, param, path="/v1/completions", status=400, code=None):
        got, answer = s.post(path, body)
        error = answer.get("error", {})
        check("refused: %s" % json.dumps(body)[:80],
              got == status and error.get("param") == param and error.get("message") and
              set(error) == {"message", "type", "param", "code"} and
              (code is None or error["code"] == code), got, answer)

    p = {"prompt": "Once"}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for name, values in {"temperature": [-1, 3, "hot"], "top_p": [0, 1.5, []], "top_k": [-2, 1.5],
                         "min_p": [2], "n": [0, 1000, 1.5], "max_tokens": [-1, "5"],
                         "seed": ["x", 1.5], "stop": [5, [""], ["a"] * 17, [1]],
                         "presence_penalty": [3], "frequency_penalty": [-3], "stream": [1, "yes"],
                         "repetition_penalty": [0], "logprobs": [21, True], "echo": [2],
                         "ignore_eos": ["no"], "priority": ["high"], "suffix": ["x"],
                         "logit_bias": [{"x": 1}, {"99999999": 1}, {"3": 101}, {"3": "a"}, [1]],
                         "response_format": [{"type": "json_object"}, {"type": "json_schema"}, 5],
                         "tools": [[{"type": "function"}]]}.items():
        for value in values:
            refused({**p, name: value}, name)
    refused({"prompt": 5}, "prompt")
    refused({}, "prompt")
    refused({"prompt": []}, "prompt")
    refused({"prompt": [1, "a"]}, "prompt")
    refused({"prompt": [[1], 5]}, "prompt")
    refused({"prompt": [123456789]}, "prompt")
    refused({"prompt": "a " * 5000}, "prompt", code="context_length_exceeded")
    refused({**p, "model": "gpt-4"}, "model", status=404, code="model_not_found")
    refused({**p, "stream_options": {"include_usage": True}}, "stream_options")
    refused([], None)
    refused({"messages": "x"}, "messages", "/v1/chat/completions")
    refused({"messages": []}, "messages", "/v1/chat/completions")
    refused({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role",
            "/v1/chat/completions")
    refused({"messages": [{"role": "user"}]}, "messages[0].content", "/v1/chat/completions")
    refused({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content", "/v1/chat/completions")
    refused({**chat, "tools": [{"type": "function"}]}, "tools", "/v1/chat/completions")
    refused({**chat, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs",
            "/v1/chat/completions")
    refused({**chat, "top_logprobs": 2}, "top_logprobs", "/v1/chat/completions")
    refused({**chat, "max_completion_tokens": 0}, "max_completion_tokens", "/v1/chat/completions")
    check("unknown fields are ignored", s.post("/v1/completions", {**p, "max_tokens": 1, "user": "u",
                                                                   "unknown": [1]})[0] == 200)
    check("null is absent", s.post("/v1/completions", {**p, "max_tokens": 1, "seed": None,
                                                       "stop": None, "n": None})[0] == 200)
    check("the text format", s.post("/v1/completions", {**p, "max_tokens": 1,
                                                        "response_format": {"type": "text"}})[0] == 200)


def test_completions(s):
    body = {"prompt": "There was a king", "max_tokens": 30, "seed": 7, "temperature": 0.9,
            "top_p": 0.9}
    expected = run("There was a king", 7, 30, "--temperature", "0.9", "--top-p", "0.9")[0]["text"]
    status, answer = s.post("/v1/completions", body)
    check("the text of llm run", answer["choices"][0]["text"] == expected, expected, answer)
    check("usage", answer["usage"]["completion_tokens"] == 30 and
          answer["usage"]["total_tokens"] == 30 + answer["usage"]["prompt_tokens"], answer)
    check("finish", answer["choices"][0]["finish_reason"] == "length", answer)
    chunks = s.stream("/v1/completions", body)
    check("a stream", chunks[-1] == "[DONE]" and text_of(chunks) == expected, chunks)
    check("finish_reason is null until the end",
          all(c["choices"][0]["finish_reason"] is None for c in chunks[:-2]) and
          chunks[-2]["choices"][0]["finish_reason"] == "length", chunks[-2:])
    chunks = s.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    check("usage in a chunk of its own", chunks[-2]["choices"] == [] and
          chunks[-2]["usage"]["completion_tokens"] == 30 and
          all(c["usage"] is None for c in chunks[:-2]), chunks[-2])
    chunks = s.stream("/v1/completions", {**body, "stream_options": {
        "include_usage": True, "continuous_usage_stats": True}})
    check("usage in every chunk", [c["usage"]["completion_tokens"] for c in chunks[:-2]] ==
          list(range(1, 31)), chunks[:2])
    ids = s.post("/tokenize", {"prompt": "There was a king"})[1]["tokens"]
    got = s.post("/v1/completions", {**body, "prompt": ids})[1]
    check("a prompt of ids", got["choices"][0]["text"] == expected, got)
    got = s.post("/v1/completions", {**body, "prompt": ["There was a king", ids, "A mill"]})[1]
    check("several prompts", [c["index"] for c in got["choices"]] == [0, 1, 2] and
          got["choices"][0]["text"] == got["choices"][1]["text"] == expected, got)
    got = s.post("/v1/completions", {**body, "n": 3})[1]
    samples = run("There was a king", 7, 30, "--temperature", "0.9", "--top-p", "0.9", "--samples",
                  "3")
    check("several samples", [c["text"] for c in got["choices"]] == [x["text"] for x in samples])
    word = expected.split()[4]
    got = s.post("/v1/completions", {**body, "stop": word})[1]["choices"][0]
    check("a stop text", got["finish_reason"] == "stop" and
          got["text"] == expected[:expected.index(word)], got)
    got = s.post("/v1/completions", {**body, "stop": [word, "zzz"]})[1]["choices"][0]
    check("a list of them", got["text"] == expected[:expected.index(word)], got)
    got = s.post("/v1/completions", {**body, "logprobs": 3})[1]["choices"][0]["logprobs"]
    check("logprobs", len(got["tokens"]) == len(got["token_logprobs"]) == 30 and
          "".join(got["tokens"]) == expected and all(len(t) <= 3 for t in got["top_logprobs"]) and
          [x["logprob"] for x in run("There was a king", 7, 30, "--temperature", "0.9", "--top-p",
                                     "0.9")[0]["tokens"]][0] - got["token_logprobs"][0] < 1e-4, got)
    check("offsets", all(expected[o:].startswith(t) for o, t in
                         zip(got["text_offset"], got["tokens"])), got)
    got = s.post("/v1/completions", {**body, "echo": True, "logprobs": 1, "max_tokens": 0})[1]
    got = got["choices"][0]
    check("the prompt's logprobs", got["text"] == "There was a king" and
          got["logprobs"]["token_logprobs"][0] is None and
          len(got["logprobs"]["tokens"]) == len(ids) and got["logprobs"]["token_logprobs"][2] < 0,
          got)
    greedy = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    first = s.post("/v1/completions", {**greedy, "logprobs": 1})[1]["choices"][0]
    ids = s.post("/tokenize", {"prompt": first["text"], "add_special_tokens": False})[1]["tokens"]
    got = s.post("/v1/completions", {**greedy, "logit_bias": {str(ids[0]): -100}})[1]["choices"][0]
    check("logit_bias", not got["text"].startswith(first["logprobs"]["tokens"][0]), first, got)
    got = s.post("/v1/completions", {**greedy, "max_tokens": 60, "frequency_penalty": 2,
                                     "presence_penalty": 2})[1]["choices"][0]["text"].split()
    check("penalties", len(set(got)) >= len(got) - 2, got)
    got = s.post("/v1/completions", {"prompt": "", "max_tokens": 3})
    check("an empty prompt begins with BOS", got[0] == 200, got)


def test_chat(s):
    body = {"messages": [{"role": "developer", "content": "Tell tales."},
                         {"role": "user", "content": [{"type": "text", "text": "A "},
                                                      {"type": "text", "text": "fox?"}]}],
            "max_completion_tokens": 12, "seed": 3}
    plain = {"messages": [{"role": "system", "content": "Tell tales."},
                          {"role": "user", "content": "A fox?"}], "max_tokens": 12, "seed": 3}
    status, a = s.post("/v1/chat/completions", body)
    status, b = s.post("/v1/chat/completions", plain)
    check("parts of text, and roles", a["choices"] == b["choices"] and
          a["choices"][0]["message"]["role"] == "assistant", a, b)
    text = "System: Tell tales.\n\nUser: A fox?\n\nAssistant:"
    c = s.post("/v1/completions", {"prompt": text, "max_tokens": 12, "seed": 3})[1]
    check("roles as text without a template",
          a["choices"][0]["message"]["content"] == c["choices"][0]["text"], a, c)
    chunks = s.stream("/v1/chat/completions", plain)
    check("a stream of deltas", chunks[0]["choices"][0]["delta"]["role"] == "assistant" and
          chunks[0]["choices"][0]["delta"]["content"] and chunks[0]["object"] ==
          "chat.completion.chunk" and
          "".join(x["choices"][0]["delta"].get("content", "") for x in chunks[:-1]) ==
          b["choices"][0]["message"]["content"], chunks[0])
    got = s.post("/v1/chat/completions", {**plain, "logprobs": True, "top_logprobs": 2})[1]
    got = got["choices"][0]["logprobs"]["content"]
    check("logprobs", "".join(bytes(t["bytes"]).decode() for t in got) ==
          b["choices"][0]["message"]["content"] and all(len(t["top_logprobs"]) == 2 for t in got))
    got = s.stream("/v1/chat/completions", {**plain, "n": 2})
    check("two samples of a stream", {c["choices"][0]["index"] for c in got[:-1]} == {0, 1}, got[:3])


def test_template():
    """Tools and variables, for a model with a template that reads them."""
    template = ("{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{{ tone|d('calm') }}"
                "{% for m in messages %}{{ '\n' + m.role }}: {{ m.content or "
                "(m.tool_calls or [])|map(attribute='function.name')|join }}{% endfor %}")
    key = b"tokenizer.chat_template"
    with tempfile.TemporaryDirectory() as folder, open(MODEL, "rb") as f:
        model, data = os.path.join(folder, "model.gguf"), f.read()
        entry = struct.pack("<Q", len(key)) + key + struct.pack("<I", 8) # then the length, text
        template += "{#" + " " * (-(len(entry) + 8 + len(template) + 4) % 32) + "#}"
        entry += struct.pack("<Q", len(template)) + template.encode() # tensors stay aligned
        n_values = struct.unpack_from("<Q", data, 16)[0]
        with open(model, "wb") as out:
            out.write(data[:16] + struct.pack("<Q", n_values + 1) + entry + data[24:])
        s = Server(model=model)
        tools = [{"type": "function", "function": {"name": "find", "parameters": {}}},
                 {"type": "function", "function": {"name": "stop"}}]
        messages = [{"role": "user", "content": "A fox?"},
                    {"role": "assistant", "content": None, "tool_calls": [
                        {"id": "1", "type": "function",
                         "function": {"name": "find", "arguments": "{}"}}]},
                    {"role": "tool", "tool_call_id": "1", "content": "a wolf"}]
        talk = "\nuser: A fox?\nassistant: find\ntool: a wolf"
        for more, given, text in (
                ({"tools": tools}, messages, "find;stop;calm" + talk),
                ({"tools": tools, "chat_template_kwargs": {"tone": "loud"}}, messages,
                 "find;stop;loud" + talk),
                ({"chat_template_kwargs": {"tone": [1]}}, messages[:1], "[1]\nuser: A fox?"),
                ({}, messages[:1], "calm\nuser: A fox?")):
            status, a = s.post("/v1/chat/completions", {"messages": given, "max_tokens": 9,
                                                        "seed": 3, **more})
            b = s.post("/v1/completions", {"prompt": text, "max_tokens": 9, "seed": 3})[1]
            check("a template with %s" % sorted(more), status == 200 and
                  a["choices"][0]["message"]["content"] == b["choices"][0]["text"] and
                  a["usage"]["prompt_tokens"] == b["usage"]["prompt_tokens"], a, b)
        status, a = s.post("/v1/chat/completions", {"messages": [{"role": None}], "tools": tools})
        check("a template's error", status == 400 and a["error"]["param"] == "messages", a)
        status, a = s.post("/v1/completions", {"prompt": "a", "tools": tools})
        check("tools without a conversation", a["error"]["param"] == "tools", a)
        check("an end", s.end() == 0)


def test_company(s):
    """The same tokens alone and with 64 other streams."""
    rng = random.Random(5)
    bodies = [{"prompt": rng.choice(["Once upon a time", "There was a king", "The wolf"]) +
               rng.choice([" who", ",", ""]), "max_tokens": rng.randint(5, 60), "seed": i}
              for i in range(65)]
    alone = text_of(s.stream("/v1/completions", bodies[0]))
    before = s.metrics()
    with concurrent.futures.ThreadPoolExecutor(65) as pool:
        answers = list(pool.map(lambda b: s.stream("/v1/completions", {
            **b, "stream_options": {"include_usage": True}}), bodies))
    check("the same in company", text_of(answers[0]) == alone, alone, text_of(answers[0]))
    check("all are complete", all(a[-1] == "[DONE]" for a in answers))
    s.idle()
    after = s.metrics()
    used = [a[-2]["usage"] for a in answers]

    def grown(name):
        return after["vllm:%s{}" % name] - before["vllm:%s{}" % name]

    check("metrics: tokens", grown("generation_tokens_total") ==
          sum(u["completion_tokens"] for u in used) and
          grown("prompt_tokens_total") == sum(u["prompt_tokens"] for u in used))
    check("metrics: requests", grown("time_to_first_token_seconds_count") == 65 ==
          grown("e2e_request_latency_seconds_count") == grown("request_queue_time_seconds_count"))
    check("metrics: latencies", grown("inter_token_latency_seconds_count") ==
          sum(u["completion_tokens"] - 1 for u in used))
    ends = sum(after[k] - before[k] for k in after if k.startswith("vllm:request_success"))
    check("metrics: ends", ends == 65, ends)


def open_stream(s, body):
    """A socket with a request for a stream."""
    data = json.dumps({**body, "stream": True}).encode()
    sock = socket.create_connection(("127.0.0.1", s.port), timeout=60)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" %
                 len(data) + data)
    return sock


def test_leaving(s):
    """Clients that leave: their requests end, and their blocks are free."""
    before = s.metrics()
    long = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True}
    socks = [open_stream(s, long) for _ in range(24)] # more than run at the same time
    for sock in socks[:8]:
        sock.recv(200)
    time.sleep(0.2)
    for sock in socks:
        sock.close()
    start = time.time()
    check("nothing runs soon after", s.idle() and time.time() - start < 5, time.time() - start)
    after = s.metrics()
    aborted = 'vllm:request_success_total{finished_reason="abort",}'
    check("they count as aborted", after[aborted] - before[aborted] >= 16, after)
    check("all blocks are free", after["vllm:kv_cache_usage_perc{}"] == 0, after)
    connection = http.client.HTTPConnection("127.0.0.1", s.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(long)) # not a stream
    time.sleep(0.1)
    connection.close()
    check("also without a stream", s.idle())


def test_attacks(s):
    rng = random.Random(11)
    good = json.dumps({"prompt": "Once", "max_tokens": 2, "seed": 1, "stop": ["x", "y"], "n": 2,
                       "logit_bias": {"5": 1.5}, "stream": False, "logprobs": 2})
    chat = json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                       "max_tokens": 2, "stream_options": None})
    pieces = ["{", "}", "[", "]", ",", ":", "null", "1e999", "-1", "\\u0000", "\\ud800", '"', "\x00",
              "9" * 400, "true", "{" * 70, "\xff", "1.5", '"stop"', '"n"']
    connection = http.client.HTTPConnection("127.0.0.1", s.port, timeout=60)
    strange = 0
    for i in range(1500):
        text = list(rng.choice([good, chat]))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            kind = rng.random()
            if kind < 0.4: text[at] = rng.choice(pieces)
            elif kind < 0.7: del text[at:at + rng.randint(1, 9)]
            else: text.insert(at, rng.choice(pieces))
            text = text or ["{"]
        path = rng.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
        connection.request("POST", path, "".join(text).encode("latin-1"))
        answer = connection.getresponse()
        body = answer.read()
        if answer.status not in (200, 400, 404) or not isinstance(json.loads(body), dict):
            strange += 1
            print(answer.status, body[:300], "".join(text)[:300])
    check("mutated bodies are answered", strange == 0, strange)
    connection.close()
    for head in [b"", b"\r\n\r\n", b"GET", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 500,
                 b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
                 b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                 b"GET /health HTTP/1.1\r\nA: " + b"x" * 200000 + b"\r\n\r\n",
                 b"GET /" + b"y" * 100000 + b" HTTP/1.1\r\n\r\n",
                 b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"]:
        sock = socket.create_connection(("127.0.0.1", s.port), timeout=10)
        try:
            sock.sendall(head)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
        except OSError:
            pass
        sock.close()
    status = None
    try:
        status = s.request("POST", "/v1/completions", b"[" * (9 << 20))[0]
    except OSError: # the server may close the connection before all is sent
        status = 413
    check("a body that is too large", status == 413, status)
    deep = s.post("/v1/completions", "[" * 100000)
    check("deep nesting", deep[0] == 400, deep)
    sockets = []
    for _ in range(1500):
        try:
            sockets.append(socket.create_connection(("127.0.0.1", s.port), timeout=10))
        except OSError:
            break
    check("many connections", len(sockets) > 900 and s.request("GET", "/health")[0] == 200,
          len(sockets))
    for sock in sockets:
        sock.close()
    check("it still answers", s.post("/v1/completions", json.loads(good))[0] == 200)


def test_slow():
    s = Server("--receive-timeout", "1")
    slow = [socket.create_connection(("127.0.0.1", s.port)) for _ in range(3)]
    slow[0].sendall(b"POST /v1/compl")
    slow[1].sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
    start = time.time()
    ends = []
    for i in range(60): # a byte now and then
        for k, sock in enumerate(slow):
            try:
                if k not in ends:
                    sock.send(b" ")
                    sock.settimeout(0.01)
                    try:
                        if sock.recv(100) == b"": ends.append(k)
                    except socket.timeout:
                        pass
            except OSError:
                ends.append(k)
        if len(ends) == 3: break
        time.sleep(0.1)
    check("slow senders are cut off", len(ends) == 3 and time.time() - start < 5, ends)
    text = text_of(s.stream("/v1/completions", {"prompt": "Once", "max_tokens": 5, "seed": 1}))
    check("others are served", len(text) > 3, text)
    check("an orderly end", s.end() == 0)


def test_limits():
    s = Server("--max-waiting", "3", "--max-sequences", "1", "--api-key", "secret", "--model-name",
               "tales", "--cors", "https://example.org")
    key = {"Authorization": "Bearer secret"}
    body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "model": "tales"}
    check("no key", s.post("/v1/completions", body)[0] == 401)
    status, headers, text = s.request("POST", "/v1/completions", body,
                                      {"Authorization": "Bearer secre"})
    check("a wrong key", status == 401 and json.loads(text)["error"]["code"] == "invalid_api_key")
    check("health needs no key", s.request("GET", "/health")[0] == 200)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: s.request("POST", "/v1/completions", body, key),
                                range(12)))
    refused = [a for a in answers if a[0] == 429]
    check("too many wait", 0 < len(refused) < 12 and all(a[1]["Retry-After"] for a in refused) and
          all(a[0] in (200, 429) for a in answers), [a[0] for a in answers])
    check("CORS", s.request("OPTIONS", "/v1/completions")[1]["Access-Control-Allow-Origin"] ==
          "https://example.org")
    check("an orderly end", s.end() == 0)


def test_end():
    body = {"prompt": "Once", "max_tokens": 700, "ignore_eos": True}
    for grace, complete in (("30", True), ("0", False)):
        s = Server("--grace", grace)
        sock = open_stream(s, body)
        data = sock.recv(4000)
        s.process.send_signal(signal.SIGTERM)
        while True:
            piece = sock.recv(65536)
            data += piece
            if not piece: break
        text = data.decode()
        told = '"server_ending"' in text
        check("grace %s s: a running stream" % grace, "data: [DONE]" in text and
              told != complete and ('"finish_reason": "length"' in text) == complete, text[-400:])
        check("exit status", s.process.wait(30) == 0)
    taken = Server()
    out = subprocess.run([LLM, "serve", "-m", MODEL, "--port", str(taken.port)], capture_output=True,
                         text=True, timeout=60)
    check("a port that is taken", out.returncode == 1 and "choose another port" in out.stderr, out)
    check("the log has JSON lines", taken.request("GET", "/health")[0] == 200 and
          taken.end(signal.SIGINT) == 0 and
          json.loads(taken.lines[-1])["path"] == "/health", taken.lines)


class Watcher:
    """A reader of GET /engine/events."""

    def __init__(self, s, headers=""):
        self.sock = socket.create_connection(("127.0.0.1", s.port), timeout=30)
        self.sock.sendall(("GET /engine/events HTTP/1.1\r\nHost: x\r\n%s\r\n" % headers).encode())
        self.data = b""

    def events(self, seconds, enough=None):
        """The states that arrive in this time, or until enough(state)."""
        got, end = [], time.time() + seconds
        while True:
            while b"\n\n" in self.data:
                part, self.data = self.data.split(b"\n\n", 1)
                at = part.find(b"data: {")
                if at < 0:
                    continue
                got.append(json.loads(part[at + 6:]))
                if enough and enough(got[-1]):
                    return got
            if time.time() >= end:
                return got
            self.sock.settimeout(max(0.01, end - time.time()))
            try:
                piece = self.sock.recv(1 << 20)
            except socket.timeout:
                return got
            if not piece:
                return got
            self.data += piece


def control(s, body, headers={}):
    return s.post("/engine/control", body, headers)


def test_watching(s):
    status, headers, text = s.request("GET", "/")
    check("the page", status == 200 and headers["Content-Type"].startswith("text/html") and
          "default-src 'none'" in headers["Content-Security-Policy"] and
          not re.search(r'(src|href)="(?!data:)', text), headers)
    s.idle()
    time.sleep(0.3) # the last change has been sent
    w = Watcher(s)
    first = w.events(10, lambda e: True)[0]
    check("a watcher first gets the whole state", first["whole"] and first["blocks"] is not None and
          first["max_sequences"] == 16 and first["settings"]["block_size"] == 16 and
          first["controls"], first)
    chunks = s.stream("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 200, "seed": 2,
                                          "ignore_eos": True})
    check("streamed", chunks[-1] == "[DONE]")
    got = w.events(10, lambda e: not e["sequences"] and e["generated"] >= first["generated"] + 200)
    blocks, steps = {}, []
    for e in got:
        for i in range(0, len(e["blocks"]), 4):
            blocks[e["blocks"][i]] = e["blocks"][i + 1:i + 4]
        steps += e["steps"]
    check("then changes, at most 20 a second", not any(e["whole"] for e in got) and
          all(b["time"] - a["time"] > 0.04 for a, b in zip(got, got[1:])), [e["time"] for e in got])
    last = max([x[0] for x in first["steps"]], default=0)
    steps = [x for x in steps if x[0] > last] # those of the first state may come again
    check("all steps", [x[0] for x in steps] == list(range(steps[0][0], steps[0][0] + 200)) and
          sum(x[1] for x in steps) == 5 and sum(x[2] for x in steps) == 199, steps)
    check("blocks are free or kept in the end", blocks and
          all(b[1] == 0 for b in blocks.values()) and any(b[2] for b in blocks.values()), blocks)
    w.sock.close()
    time.sleep(1.5) # the server notices it
    slow = Watcher(s)
    slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    watchers = [Watcher(s) for _ in range(63)]
    firsts = [x.events(20, lambda e: True) for x in watchers]
    check("many watchers", all(f and f[0]["whole"] for f in firsts))
    extra = s.request("GET", "/engine/events")
    check("not too many", extra[0] == 429, extra)
    for x in watchers[::2]:
        x.sock.close() # some leave in the middle
    test_company(s)
    late = watchers[1].events(5, lambda e: not e["sequences"])
    check("watchers in company", late and not late[-1]["sequences"], late[-1:])
    for x in watchers:
        x.sock.close()
    slow.sock.close()
    end = time.time() + 10
    while time.time() < end and s.request("HEAD", "/engine/events")[0] != 200: time.sleep(0.1)
    time.sleep(1.5)
    again = Watcher(s)
    check("places are free again", again.events(10, lambda e: True)[0]["whole"])
    again.sock.close()


def test_control(s):
    def refused(body, param):
        status, answer = control(s, body)
        error = answer.get("error", {})
        check("refused: %s" % body, status == 400 and error.get("param") == param and
              error.get("message"), status, answer)

    for name, values in {"block_size": [0, 1025, -1, 1.5, "8"], "cache_tokens": [-1, "x", 1e12],
                         "prefix_cache": [1], "chunked_prefill": ["no"], "speculation": [2]}.items():
        for value in values:
            refused({"settings": {name: value}}, name)
    refused({"settings": 5}, "settings")
    refused({"paused": 1}, "paused")
    refused({"steps": 0}, "steps")
    refused({"steps": 1001}, "steps")
    refused({"pace": -1}, "pace")
    refused([], None)
    check("a setting that cannot be", control(s, {"settings": {"cache_tokens": 1}})[0] == 400)
    check("not from another page", control(s, {"paused": True}, {"Origin": "http://evil.test"})[0]
          == 403)
    check("from its own page", control(s, {"paused": False}, {
        "Origin": "http://127.0.0.1:%d" % s.port})[0] == 200)
    body = {"prompt": "There was a king", "max_tokens": 30, "temperature": 0}
    expected = s.post("/v1/completions", body)[1]["choices"][0]["text"]
    w = Watcher(s)
    check("pause", control(s, {"paused": True})[1]["paused"])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answer = pool.submit(s.post, "/v1/completions", body)
        check("paused: it waits", w.events(10, lambda e: e["paused"] and e["sequences"])[-1]
              ["sequences"][0][3] == 0)
        control(s, {"steps": 3})
        got = w.events(10, lambda e: sum(len(x["steps"]) for x in [e]) and e["sequences"] and
                       e["sequences"][0][6] >= 3)
        check("single steps", got and got[-1]["sequences"][0][6] == 3 and not answer.done(), got[-1:])
        control(s, {"paused": False})
        check("the same text", answer.result()[1]["choices"][0]["text"] == expected)
    for settings in ({"prefix_cache": False}, {"chunked_prefill": False}, {"speculation": True},
                     {"block_size": 8}, {"cache_tokens": 2048}):
        status, answer = control(s, {"settings": settings})
        check("settings: %s" % settings, status == 200 and
              settings.items() <= answer["settings"].items(), answer)
        check("the same text with %s" % settings,
              s.post("/v1/completions", body)[1]["choices"][0]["text"] == expected)
    got = w.events(10, lambda e: e["whole"] and e["settings"]["cache_tokens"] == 2048)
    check("watchers get a whole state after a restart", got and got[-1]["blocks_total"] == 256, got[-1:])
    w.sock.close()
    start = {"prefix_cache": True, "chunked_prefill": True, "speculation": False, "block_size": 16,
             "cache_tokens": 0}
    check("back", control(s, {"settings": start})[1]["settings"] == start)
    long = {"prompt": "Once", "max_tokens": 700, "ignore_eos": True}
    control(s, {"pace": 50})
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        streams = [pool.submit(s.stream, "/v1/completions", long) for _ in range(64)]
        time.sleep(0.5)
        before = s.metrics()
        for i in range(6):
            check("control in company", control(s, {"paused": i % 2 == 0, "steps": 1})[0] == 200)
        check("restart in company", control(s, {"settings": {"block_size": 32}})[0] == 200)
        ends = [x.result() for x in streams]
    told = [e for e in ends if "engine_restarted" in json.dumps(e[-2:])]
    check("all are told", len(told) == 64, len(told), ends[0][-2:])
    after = s.metrics()
    check("counters do not fall", all(after[k] >= before[k] for k in before if "_total" in k))
    check("no pace", control(s, {"pace": 0, "paused": False, "settings": start})[0] == 200)
    for i in range(10): # the memory of an engine is freed
        control(s, {"settings": {"block_size": 8 if i % 2 == 0 else 16}})
    check("served after it", s.post("/v1/completions", body)[1]["choices"][0]["text"] == expected)


def test_control_limits():
    s = Server("--host", "0.0.0.0")
    check("no control where others reach it", control(s, {"paused": True})[0] == 403)
    w = Watcher(s)
    check("the page knows", not w.events(10, lambda e: True)[0]["controls"])
    check("an orderly end with a watcher", s.end() == 0 and w.sock.recv(1 << 16) is not None)
    s = Server("--host", "0.0.0.0", "--page-controls", "--api-key", "secret", "--grace", "20")
    key = {"Authorization": "Bearer secret"}
    check("the page needs no key", s.request("GET", "/")[0] == 200)
    check("its states do", s.request("GET", "/engine/events")[0] == 401)
    check("control needs the key", control(s, {"paused": True})[0] == 401)
    check("with --page-controls and the key", control(s, {"paused": True}, key)[0] == 200)
    sock = socket.create_connection(("127.0.0.1", s.port), timeout=60)
    data = json.dumps({"prompt": "Once", "max_tokens": 20, "stream": True}).encode()
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
                 b"Content-Length: %d\r\n\r\n" % len(data) + data)
    time.sleep(0.3)
    watcher = Watcher(s, "Authorization: Bearer secret\r\n")
    watcher.events(1, lambda e: True)
    start = time.time()
    s.process.send_signal(signal.SIGTERM)
    got = b""
    while True:
        piece = sock.recv(65536)
        got += piece
        if not piece: break
    check("a paused server serves what it has, and ends", s.process.wait(30) == 0 and
          b"data: [DONE]" in got and b"finish_reason\": \"" in got and time.time() - start < 10,
          got[-300:])


def test_load(s):
    before = s.metrics()["vllm:generation_tokens_total{}"]
    load = [sys.executable, os.path.join(TOP, "tests", "serve_load.py"), s.url]
    out = subprocess.run(load + ["--clients", "20", "--prompt", "30", "--tokens", "9", "--vocabulary",
                                 "2000", "--together"], capture_output=True, text=True)
    check("the load generator", out.returncode == 0 and out.stdout.startswith("20 requests") and
          s.metrics()["vllm:generation_tokens_total{}"] == before + 180, out)


def main():
    s = Server("--max-sequences", "16")
    for test in (test_endpoints, test_errors, test_completions, test_chat, test_company,
                 test_leaving, test_load):
        test(s)
    test_watching(s)
    test_control(s)
    check("idle", s.idle())
    test_attacks(s) # twice: the first time, the allocator keeps what it needs most
    before = s.memory()
    test_attacks(s)
    test_company(s)
    test_watching(s)
    test_control(s)
    check("idle", s.idle())
    after = s.memory()
    if "SERVE_SANITIZED" not in os.environ: # a sanitizer keeps freed memory
        check("memory does not grow", after < before + 20000, before, after)
    check("blocks are free", s.metrics()["vllm:kv_cache_usage_perc{}"] == 0)
    check("an orderly end", s.end() == 0)
    test_template()
    test_slow()
    test_limits()
    test_control_limits()
    test_end()
    return finish()


sys.exit(main())
