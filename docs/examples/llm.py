"""llm.py - llm.h from Python, with the standard library only (ctypes).

    cc -O2 -fopenmp -shared -fPIC -DLLM_IMPLEMENTATION -x c llm.h -o build/libllm.so -lm
    python3 docs/examples/llm.py models/tales-q4_0.gguf "Once upon a time"

The library is $LLM_LIBRARY, or build/libllm.so, compiled by the command above if it is missing or
older than llm.h (in about a minute). In a program:

    import llm
    with llm.Engine("models/tales-q4_0.gguf") as engine:
        for piece in engine.generate("Once upon a time", max_tokens=50, temperature=0.8):
            print(piece, end="", flush=True)

An engine belongs to one thread at a time. Generations of one engine run at the same time: reading
any of them runs the steps for all.
"""
import collections
import ctypes
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = "{cc} -O2 {openmp} -shared -fPIC -DLLM_IMPLEMENTATION -x c {header} -o {library} -lm"

# ---- Structs: fields in the order of llm.h. tests/python.sh compares sizes and offsets with C

c_int, c_bool, c_float, c_uint64 = ctypes.c_int, ctypes.c_bool, ctypes.c_float, ctypes.c_uint64
c_void_p, c_char_p, c_size_t = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t


class Error(ctypes.Structure):
    c_name = "llm_error"
    _fields_ = [("status", c_int), ("message", ctypes.c_char * 512), ("option", ctypes.c_char_p)]


class Config(ctypes.Structure):
    c_name = "llm_config"
    _fields_ = [
        ("architecture", ctypes.c_char * 32), ("vocab_size", c_int), ("context_length", c_int),
        ("n_layers", c_int), ("dim", c_int), ("hidden_dim", c_int), ("n_experts", c_int),
        ("n_experts_used", c_int), ("expert_dim", c_int), ("shared_dim", c_int),
        ("norm_experts", c_bool), ("n_heads", c_int),
        ("n_kv_heads", c_int), ("head_dim", c_int), ("rope_dim", c_int), ("rope_base", c_float),
        ("rope_pairing", c_int), ("rope_scaling", c_int), ("rope_factor", c_float),
        ("rope_original_context", c_int), ("rope_beta_fast", c_float), ("rope_beta_slow", c_float),
        ("rope_magnitude", c_float), ("norm_epsilon", c_float), ("local_rope_base", c_float),
        ("embedding_scale", c_float), ("residual_scale", c_float), ("attention_scale", c_float),
        ("logit_scale", c_float), ("score_cap", c_float), ("logit_cap", c_float),
        ("activation", c_int), ("alibi", c_float), ("parallel", c_bool), ("window", c_int),
        ("tied_output", c_bool)]


class EngineOptions(ctypes.Structure):
    c_name = "llm_engine_options"
    _fields_ = [
        ("draft", c_void_p), ("backend", c_void_p), ("n_threads", c_int), ("max_isa", c_int),
        ("pack_weights", c_bool), ("context_length", c_int), ("block_size", c_int),
        ("cache_type", c_int), ("cache_bytes", c_uint64), ("memory_share", c_float),
        ("max_sequences", c_int), ("max_batch_tokens", c_int), ("max_speculation", c_int),
        ("preempt", c_int), ("swap_bytes", c_uint64), ("prefix_cache", c_bool),
        ("chunked_prefill", c_bool), ("naive_attention", c_bool), ("fusions", ctypes.c_uint),
        ("host_sampling", c_bool), ("trace", c_void_p), ("trace_user", c_void_p)]


class Sampling(ctypes.Structure):
    c_name = "llm_sampling"
    _fields_ = [
        ("temperature", c_float), ("top_k", c_int), ("top_p", c_float), ("min_p", c_float),
        ("repetition_penalty", c_float), ("penalty_window", c_int),
        ("presence_penalty", c_float), ("frequency_penalty", c_float), ("bias", c_void_p),
        ("n_bias", c_int), ("seed", c_uint64)]


class Request(ctypes.Structure):
    c_name = "llm_request"
    _fields_ = [
        ("prompt", ctypes.POINTER(ctypes.c_int32)), ("n_prompt", c_int), ("max_tokens", c_int),
        ("n_samples", c_int), ("sampling", Sampling), ("embedding", c_bool),
        ("ignore_end", c_bool), ("stop", ctypes.POINTER(c_char_p)), ("n_stop", c_int),
        ("top_logprobs", c_int), ("priority", c_int), ("speculate", c_int), ("branches", c_int),
        ("lookup", c_bool),
        ("logits_hook", c_void_p),
        ("user", c_void_p)]


class Event(ctypes.Structure):
    c_name = "llm_event"
    _fields_ = [
        ("request", c_uint64), ("sample", c_int), ("user", c_void_p), ("token", ctypes.c_int32),
        ("index", c_int), ("logprob", c_float), ("top", c_void_p),
        ("n_top", c_int), ("accepted", c_bool), ("text", c_void_p),
        ("text_length", c_size_t), ("finish", c_int), ("error", c_char_p),
        ("last_hidden", ctypes.POINTER(c_float)), ("mean_hidden", ctypes.POINTER(c_float))]


STRUCTS = [Error, Config, EngineOptions, Sampling, Request, Event]

# ---- Functions: as llm.h declares them. tests/python.sh checks them with a C compiler

FUNCTIONS = """
const char *llm_version(void);
const char *llm_status_name(llm_status status);
const char *llm_finish_name(llm_finish finish);
llm_model *llm_model_load(const char *path, llm_error *err);
void llm_model_free(llm_model *model);
const llm_config *llm_model_config(const llm_model *model);
const llm_tokenizer *llm_model_tokenizer(const llm_model *model);
int64_t llm_tokenize(const llm_tokenizer *t, const char *text, size_t length, unsigned flags,
    int32_t *ids, int64_t capacity, llm_error *err);
int64_t llm_detokenize(const llm_tokenizer *t, const int32_t *ids, int64_t n, char *text,
    size_t capacity, llm_error *err);
llm_engine_options llm_engine_defaults(void);
llm_request llm_request_defaults(void);
llm_engine *llm_engine_create(const llm_model *model, const llm_engine_options *options,
    llm_error *err);
void llm_engine_free(llm_engine *engine);
bool llm_submit(llm_engine *engine, const llm_request *request, uint64_t *id, llm_error *err);
int llm_step(llm_engine *engine, llm_error *err);
bool llm_next_event(llm_engine *engine, llm_event *event);
bool llm_cancel(llm_engine *engine, uint64_t id, llm_error *err);
void *llm_session_save(llm_engine *engine, uint64_t id, size_t *size, llm_error *err);
void llm_session_free(void *session);
bool llm_session_restore(llm_engine *engine, const void *session, size_t size,
    const llm_request *callbacks, uint64_t *id, llm_error *err);
"""

TYPES = {
    "void": None, "bool": c_bool, "int": c_int, "unsigned": ctypes.c_uint,
    "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint64_t": c_uint64,
    "size_t": c_size_t, "llm_status": c_int, "llm_finish": c_int}
TYPES.update({struct.c_name: struct for struct in STRUCTS})
POINTERS = {
    "char": c_char_p, "int32_t": ctypes.POINTER(ctypes.c_int32),
    "uint64_t": ctypes.POINTER(c_uint64), "size_t": ctypes.POINTER(c_size_t)}
POINTERS.update({struct.c_name: ctypes.POINTER(struct) for struct in STRUCTS})
TOKENIZE_BOS, TOKENIZE_SPECIAL = 1, 2


def _type(declared):
    """The ctypes type of "const char *name" or "int name". A pointer to another type is void *."""
    name, pointer = re.match(r"(?:const )?(\w+) ?(\*?)", declared).groups()
    return POINTERS.get(name, c_void_p) if pointer else TYPES[name]


def build(library, header):
    """Compile the shared library."""
    os.makedirs(os.path.dirname(library), exist_ok=True)
    cc = os.environ.get("CC", "cc")
    new = "%s.%d" % (library, os.getpid())
    for openmp in ("-fopenmp", ""):  # some compilers lack OpenMP
        command = BUILD.format(cc=cc, openmp=openmp, header=header, library=new).split()
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            os.replace(new, library)
            return
    raise OSError("%s\n%s" % (" ".join(command), result.stderr))


def load(library=None):
    """Load the shared library, with the types of all functions above."""
    library = library or os.environ.get("LLM_LIBRARY")
    if not library:
        library, header = os.path.join(ROOT, "build", "libllm.so"), os.path.join(ROOT, "llm.h")
        if not os.path.exists(library) or os.path.getmtime(library) < os.path.getmtime(header):
            build(library, header)
    c = ctypes.CDLL(library)
    for result, name, arguments in re.findall(r"(\S.*?)(\w+)\((.*?)\);",
                                              " ".join(FUNCTIONS.split())):
        function = getattr(c, name)
        function.restype = _type(result)
        function.argtypes = [_type(a) for a in arguments.split(", ") if a != "void"]
    return c


class LlmError(Exception):
    """A call that failed. status: "argument", "file", "format", ... as in llm.h's llm_status."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


Embedding = collections.namedtuple("Embedding", "last mean")  # lists of `dim` numbers


class Engine:
    """A model and an engine. options: fields of llm_engine_options, such as n_threads=4."""

    def __init__(self, path, library=None, **options):
        self.c = load(library)
        self.model = self.engine = None
        self.running = {}  # request id: Generation, for requests that have not ended
        o = self.c.llm_engine_defaults()
        _set(o, options)
        self.model = self._call("llm_model_load", os.fsencode(path))
        try:
            self.engine = self._call("llm_engine_create", self.model, ctypes.byref(o))
        except LlmError:
            self.close()
            raise
        self.config = self.c.llm_model_config(self.model).contents
        self.tokenizer = self.c.llm_model_tokenizer(self.model)

    def _call(self, name, *arguments):
        err = Error()
        result = getattr(self.c, name)(*arguments, ctypes.byref(err))
        if err.status:
            status = self.c.llm_status_name(err.status).decode()
            raise LlmError(status, err.message.decode("utf-8", "replace"))
        return result

    def close(self):
        for generation in self.running.values():
            generation.ended = True
        self.running = {}
        if self.engine:
            self.c.llm_engine_free(self.engine)
        if self.model:
            self.c.llm_model_free(self.model)
        self.engine = self.model = None

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def __del__(self):
        if hasattr(self, "model"):
            self.close()

    def tokenize(self, text, bos=True, special=False):
        """Text (str or bytes) to a list of ids. special: "<|im_end|>" and the like are tokens."""
        text = text.encode() if isinstance(text, str) else text
        flags = (TOKENIZE_BOS if bos else 0) | (TOKENIZE_SPECIAL if special else 0)
        n = self._call("llm_tokenize", self.tokenizer, text, len(text), flags, None, 0)
        ids = (ctypes.c_int32 * n)()
        self._call("llm_tokenize", self.tokenizer, text, len(text), flags, ids, n)
        return list(ids)

    def detokenize(self, ids):
        array = (ctypes.c_int32 * len(ids))(*ids)
        n = self._call("llm_detokenize", self.tokenizer, array, len(ids), None, 0)
        text = ctypes.create_string_buffer(n)
        self._call("llm_detokenize", self.tokenizer, array, len(ids), text, n)
        return text.raw.decode("utf-8", "replace")

    def generate(self, prompt, stop=(), **options):
        """Continue a prompt (text, or a list of ids). options: fields of llm_request and of
        llm_sampling, such as max_tokens=50, temperature=0.8. Returns an iterator over pieces of
        text: whole characters, even if a character has several tokens."""
        r = self.c.llm_request_defaults()
        ids = prompt if isinstance(prompt, (list, tuple)) else self.tokenize(prompt)
        stops = [s.encode() for s in stop]
        r.prompt, r.n_prompt = (ctypes.c_int32 * len(ids))(*ids), len(ids)
        r.stop, r.n_stop = (c_char_p * len(stops))(*stops), len(stops)
        _set(r.sampling, {k: options.pop(k) for k in list(options) if hasattr(r.sampling, k)})
        _set(r, options)
        if r.n_samples != 1:
            raise ValueError("a Generation has one sample: call generate once for each")
        request = c_uint64()
        self._call("llm_submit", self.engine, ctypes.byref(r), ctypes.byref(request))
        return Generation(self, request.value)

    def embed(self, texts):
        """For each text, the hidden states after the final norm: last token, and mean of all."""
        all_of_them = [self.generate(text, embedding=True) for text in texts]
        for generation in all_of_them:
            list(generation)
        return [generation.embedding for generation in all_of_them]

    def restore(self, session):
        """Continue a request that Generation.save returned."""
        request = c_uint64()
        self._call("llm_session_restore", self.engine, session, len(session), None,
                   ctypes.byref(request))
        return Generation(self, request.value)

    def step(self):
        """Run a step and pass on its events. False: there is nothing left to do."""
        more = self._call("llm_step", self.engine)
        event = Event()
        while self.c.llm_next_event(self.engine, ctypes.byref(event)):
            if event.request in self.running:
                self.running[event.request]._take(event)
        return more > 0


class Generation:
    """An iterator over the text of one request. It runs until it ends or is cancelled.

    tokens: the ids so far. finish: None while it runs, then "end", "length", "stop", "cancelled" or
    "error"."""

    def __init__(self, engine, request):
        self.engine, self.request = engine, request
        self.pieces = collections.deque()
        self.tokens, self.finish, self.error, self.embedding = [], None, None, None
        self.ended = False
        engine.running[request] = self

    def _take(self, event):
        if event.text_length:
            self.pieces.append(ctypes.string_at(event.text, event.text_length).decode())
        if event.token >= 0:
            self.tokens.append(event.token)
        if event.last_hidden:
            dim = self.engine.config.dim
            self.embedding = Embedding(event.last_hidden[:dim], event.mean_hidden[:dim])
        if event.finish:
            self.finish = self.engine.c.llm_finish_name(event.finish).decode()
            self.error = event.error.decode() if event.error else None
            self.ended = True
            del self.engine.running[self.request]

    def __iter__(self):
        return self

    def __next__(self):
        while not self.pieces and not self.ended:
            self.engine.step()
        if self.pieces:
            return self.pieces.popleft()
        error, self.error = self.error, None
        if error:
            raise LlmError("format", error)
        raise StopIteration

    def save(self):
        """The request with its cache, as bytes: Engine.restore continues it. Pieces that have not
        been read are not included."""
        size = c_size_t()
        session = self.engine._call("llm_session_save", self.engine.engine, self.request,
                                    ctypes.byref(size))
        try:
            return ctypes.string_at(session, size.value)
        finally:
            self.engine.c.llm_session_free(session)

    def cancel(self):
        if not self.ended:
            self.ended = True
            self.finish = "cancelled"
            del self.engine.running[self.request]
            self.engine._call("llm_cancel", self.engine.engine, self.request)


def _set(struct, options):
    for name, value in options.items():
        if not any(name == field[0] for field in struct._fields_):
            raise TypeError("%s has no field %s" % (struct.c_name, name))
        setattr(struct, name, value)


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "models", "tales-q4_0.gguf")
    text = sys.argv[2] if len(sys.argv) > 2 else "Once upon a time"
    try:
        with Engine(path) as some_engine:
            print(text, end="")
            for piece in some_engine.generate(text, max_tokens=100):
                print(piece, end="", flush=True)
            print()
    except LlmError as failure:
        sys.exit("%s: %s" % (failure.status, failure))
