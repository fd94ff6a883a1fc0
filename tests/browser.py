"""One page of a headless Chromium, driven through its debugging pipe, or of Firefox, driven through
WebDriver BiDi. SHOTS=FOLDER: screenshots go there."""
import base64, json, os, re, select, shutil, socket, struct, subprocess, tempfile, time

SHOTS = os.environ.get("SHOTS")


class Browser:
    """One page of a headless browser, which takes and gives JSON messages."""

    def __init__(self, program):
        self.program, self.folder = program, tempfile.mkdtemp()
        self.data, self.n, self.errors, self.extra = b"", 0, [], {}
        self.start()

    def more(self, seconds):
        """Add what has arrived to `data`. False: nothing came in time."""
        if not select.select([self.source], [], [], max(0, seconds))[0]:
            return False
        piece = os.read(self.source, 1 << 20)
        if not piece:
            raise EOFError("the browser ended")
        self.data += piece
        return True

    def send(self, method, **parameters):
        self.n += 1
        self.write(json.dumps({"id": self.n, "method": method, "params": parameters, **self.extra})
                   .encode())
        end = time.time() + 60
        while True:
            text = self.read(end)
            if text is None:
                raise TimeoutError(method)
            answer = json.loads(text)
            self.note(answer.get("method"), answer.get("params", {}))
            if answer.get("id") == self.n:
                if "error" in answer:
                    raise RuntimeError(answer)
                return answer["result"]

    def until(self, code, seconds=30):
        """Wait until an expression is true."""
        end = time.time() + seconds
        while time.time() < end:
            if self.run("(() => { try { return !!(%s) } catch { return false } })()" % code):
                return True # while the page is loading, the code may fail
            time.sleep(0.03)
        return False

    def shot(self, name):
        if SHOTS:
            os.makedirs(SHOTS, exist_ok=True)
            data = self.picture(name.startswith("390")) # of a phone: the whole page
            open(os.path.join(SHOTS, name + ".png"), "wb").write(base64.b64decode(data))

    def end(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Chromium(Browser):
    """Messages are followed by a zero, on two pipes."""

    def start(self):
        to_read, self.to = os.pipe()
        self.source, from_write = os.pipe()
        command = 'a=$1 b=$2; shift 2; eval "exec \\"\\$@\\" 3<&$a 4>&$b"'
        self.process = subprocess.Popen(
            ["bash", "-c", command, "bash", str(to_read), str(from_write), self.program,
             "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--no-first-run", "--disable-extensions", "--hide-scrollbars",
             "--user-data-dir=" + self.folder, "--remote-debugging-pipe", "about:blank"],
            pass_fds=(to_read, from_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(from_write)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.extra = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log"):
            self.send(domain + ".enable")

    def write(self, text):
        os.write(self.to, text + b"\0")

    def read(self, end):
        while b"\0" not in self.data:
            if not self.more(end - time.time()):
                return None
        text, self.data = self.data.split(b"\0", 1)
        return text

    def note(self, method, p):
        if method == "Runtime.exceptionThrown":
            self.errors.append(p["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and p["type"] in ("error", "warning", "assert"):
            self.errors.append(p["args"])
        elif method == "Log.entryAdded" and p["entry"]["level"] in ("error", "warning"):
            self.errors.append(p["entry"])

    def open(self, url):
        self.send("Page.navigate", url=url)

    def run(self, code):
        result = self.send("Runtime.evaluate", expression=code, returnByValue=True,
                           awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def size(self, width, height):
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)

    def key(self, key):
        more = {"code": "Enter", "text": "\r", "windowsVirtualKeyCode": 13} if key == "Enter" \
            else {"text": key}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, whole):
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"captureBeyondViewport": True, "clip": {**size, "scale": 1}} if whole else {}
        return self.send("Page.captureScreenshot", **clip)["data"]

    def pages(self):
        pdf = base64.b64decode(self.send("Page.printToPDF", preferCSSPageSize=True,
                                         printBackground=True)["data"])
        return len(re.findall(rb"/Type\s*/Page\b", pdf))


class Firefox(Browser):
    """Messages are frames of a WebSocket (RFC 6455)."""

    def start(self):
        self.process = subprocess.Popen(
            [self.program, "--headless", "--no-remote", "--profile", self.folder,
             "--remote-debugging-port", "0", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "HOME": self.folder, "MOZ_CRASHREPORTER_DISABLE": "1"})
        for line in self.process.stderr:
            found = re.search(r"BiDi listening on ws://([^:]*):(\d+)", line)
            if found:
                break
        else:
            raise EOFError("Firefox did not start")
        self.socket = socket.create_connection((found[1], int(found[2])))
        self.source = self.socket.fileno()
        self.socket.sendall(b"GET /session HTTP/1.1\r\nHost: %s:%s\r\nUpgrade: websocket\r\n"
                            b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
                            % (found[1].encode(), found[2].encode()))
        while b"\r\n\r\n" not in self.data and self.more(30):
            pass
        self.data = self.data.split(b"\r\n\r\n", 1)[1]
        self.send("session.new", capabilities={})
        self.page = self.send("browsingContext.getTree")["contexts"][0]["context"]
        self.send("session.subscribe", events=["log.entryAdded"])

    def write(self, text):
        n = len(text)
        size = struct.pack("!B", 128 | n) if n < 126 else struct.pack("!BH", 254, n)
        mask = b"mask" * (n // 4 + 1)
        self.socket.sendall(b"\x81" + size + b"mask" + bytes(a ^ b for a, b in zip(text, mask)))

    def need(self, n, end):
        while len(self.data) < n:
            if not self.more(end - time.time()):
                return False
        return True

    def read(self, end):
        text, last = b"", False
        while not last:
            if not self.need(2, end):
                return None
            kind, n, at = self.data[0], self.data[1], 2
            wide = {126: 2, 127: 8}.get(n, 0)
            if not self.need(at + wide, end):
                return None
            if wide:
                n, at = int.from_bytes(self.data[2:2 + wide], "big"), 2 + wide
            if not self.need(at + n, end):
                return None
            if kind & 15 < 3:
                text += self.data[at:at + n]
                last = kind & 128
            self.data = self.data[at + n:]
        return text

    def note(self, method, p):
        if method == "log.entryAdded" and p["level"] in ("error", "warn"):
            self.errors.append(p)

    def open(self, url):
        self.send("browsingContext.navigate", context=self.page, url=url, wait="complete")

    def run(self, code):
        code = "(async () => { const value = await eval(%s); return JSON.stringify(value) })()" % \
            json.dumps(code)
        result = self.send("script.evaluate", expression=code, target={"context": self.page},
                           awaitPromise=True)
        if result["type"] == "exception":
            raise RuntimeError(result["exceptionDetails"])
        value = result["result"].get("value")
        return None if value is None else json.loads(value)

    def size(self, width, height):
        self.send("browsingContext.setViewport", context=self.page,
                  viewport={"width": width, "height": height})

    def key(self, key):
        value = "\ue007" if key == "Enter" else key
        self.send("input.performActions", context=self.page, actions=[{
            "type": "key", "id": "keyboard",
            "actions": [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]}])

    def picture(self, whole):
        return self.send("browsingContext.captureScreenshot", context=self.page,
                         origin="document" if whole else "viewport")["data"]

    def pages(self):
        pdf = base64.b64decode(self.send("browsingContext.print", context=self.page)["data"])
        return len(re.findall(rb"/Type\s*/Page\b", pdf))


def browser(program):
    return (Firefox if "firefox" in os.path.basename(program) else Chromium)(program)
