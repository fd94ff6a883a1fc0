"""tests/serve_clients.py LLM: the server with the openai client (sync, async, streams, errors), with
huggingface_hub's, and with Prometheus' parser. Run by tests/serve_clients.sh."""
import asyncio, os, sys, time, urllib.request

import openai
from huggingface_hub import InferenceClient
from prometheus_client.parser import text_string_to_metric_families
from serve_util import Server, check, finish


def raises(name, kind, call, code=None):
    try:
        check(name, False, call())
    except kind as error:
        check(name, code is None or error.code == code, error)


def metrics(url):
    text = urllib.request.urlopen(url + "/metrics").read().decode()
    return {s.name + str(sorted((k, v) for k, v in s.labels.items() if k == "finished_reason")):
            s.value for f in text_string_to_metric_families(text) for s in f.samples}


def test_sync(client):
    check("models", [m.id for m in client.models.list()] == ["tales-q4_0"])
    ask = dict(model="tales-q4_0", messages=[{"role": "user", "content": "A fox?"}], seed=4,
               max_tokens=20)
    chat = client.chat.completions.create(**ask)
    text = chat.choices[0].message.content
    check("chat", text and chat.choices[0].finish_reason in ("stop", "length") and
          chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens, chat)
    chunks = list(client.chat.completions.create(**ask, stream=True,
                                                 stream_options={"include_usage": True}))
    check("stream", "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
          and chunks[-1].usage.completion_tokens == chat.usage.completion_tokens, chunks[-1])
    word = text.split()[2]
    with client.chat.completions.stream(**ask, stop=word) as stream: # it rejects a cut text
        for event in stream:
            pass
        final = stream.get_final_completion()
    check("the stream helper", final.choices[0].message.content == text[:text.index(word)], final)
    several = client.chat.completions.create(**ask, n=3)
    check("n", len({c.message.content for c in several.choices}) == 3 and
          several.choices[0].message.content == text, several)
    lp = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3).choices[0].logprobs
    check("logprobs", "".join(t.token for t in lp.content) == text and
          all(len(t.top_logprobs) == 3 and t.top_logprobs[0].logprob >= t.logprob - 1e-6
              for t in lp.content), lp)
    done = client.completions.create(model="tales-q4_0", prompt="Once upon", max_tokens=9, seed=1,
                                     logprobs=2, echo=True)
    check("completions", done.choices[0].text.startswith("Once upon") and
          len(done.choices[0].logprobs.tokens) == len(done.choices[0].logprobs.token_logprobs), done)
    stopped = client.chat.completions.create(**ask, stop=[word])
    check("stop", word not in stopped.choices[0].message.content and
          stopped.choices[0].finish_reason == "stop", stopped)
    raises("an unknown model", openai.NotFoundError,
           lambda: client.chat.completions.create(**{**ask, "model": "x"}), "model_not_found")
    raises("too long", openai.BadRequestError,
           lambda: client.completions.create(model="tales-q4_0", prompt="a " * 9000),
           "context_length_exceeded")
    raises("a bad value", openai.BadRequestError,
           lambda: client.chat.completions.create(**ask, temperature=9))
    raises("tools", openai.BadRequestError, lambda: client.chat.completions.create(
        **ask, tools=[{"type": "function", "function": {"name": "f"}}]), "unsupported_parameter")
    raises("a wrong key", openai.AuthenticationError,
           lambda: client.with_options(api_key="wrong").models.list(), "invalid_api_key")


async def test_async(client, url):
    async def one(i):
        stream = await client.completions.create(model="tales-q4_0", prompt="The wolf", seed=i % 4,
                                                 max_tokens=40, stream=True)
        return "".join([c.choices[0].text async for c in stream if c.choices])

    texts = await asyncio.gather(*(one(i) for i in range(40)))
    check("40 streams", all(texts[i] == texts[i % 4] for i in range(40)) and len(set(texts)) == 4)
    before = metrics(url)
    stream = await client.completions.create(model="tales-q4_0", prompt="The wolf", stream=True,
                                             max_tokens=900, extra_body={"ignore_eos": True})
    async for chunk in stream:
        await stream.close() # in the middle
        break
    end = time.time() + 5
    while time.time() < end and metrics(url)["vllm:num_requests_running[]"]:
        await asyncio.sleep(0.05)
    after = metrics(url)
    key = "vllm:request_success_total[('finished_reason', 'abort')]"
    check("cancelled in the middle", after["vllm:num_requests_running[]"] == 0 and
          after[key] == before[key] + 1, before[key], after[key])
    check("Prometheus reads the metrics", "vllm:time_to_first_token_seconds_count[]" in after, after)


def test_hub(url):
    client = InferenceClient(base_url=url + "/v1", api_key="key")
    ask = dict(model="tales-q4_0", messages=[{"role": "user", "content": "A fox?"}], seed=4,
               max_tokens=20)
    text = client.chat_completion(**ask).choices[0].message.content
    parts = [c.choices[0].delta.content or "" for c in client.chat_completion(**ask, stream=True)
             if c.choices]
    check("huggingface_hub", text and "".join(parts) == text, text, parts)


def main():
    server = Server("--api-key", "key", "--log", os.devnull)
    url = server.url
    options = dict(base_url=url + "/v1", api_key="key", max_retries=0, timeout=120)
    test_sync(openai.OpenAI(**options))
    asyncio.run(test_async(openai.AsyncOpenAI(**options), url))
    test_hub(url)
    check("an orderly end", server.end() == 0)
    return finish()


sys.exit(main())
