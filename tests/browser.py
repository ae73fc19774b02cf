"""A browser for tests: Debian's chromium-headless-shell, controlled with the DevTools protocol over a pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

PROGRAM = "chromium-headless-shell"


def available():
    return shutil.which(PROGRAM) is not None


class Page:
    """An open page, with a record of its network requests and console messages."""

    def __init__(self, url, width=1280, height=900):
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()

        def as_3_and_4():
            a, b = os.dup2(commands, 20), os.dup2(answers, 21)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self._process = subprocess.Popen(
            [PROGRAM, "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars",
             f"--window-size={width},{height}", "about:blank"],
            close_fds=False, preexec_fn=as_3_and_4, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(answers)
        self._buffer, self._number, self._session = b"", 0, None
        self.requests, self.console = [], []
        target = self.call("Target.getTargets")["targetInfos"][0]["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._session = None
        try:
            self.call("Browser.close")
        except (OSError, TimeoutError):
            pass
        self._process.kill()
        self._process.wait(10)
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            end = self._buffer.find(b"\0")
            if end < 0:
                if not select.select([self._answers], [], [], max(0, deadline - time.monotonic()))[0]:
                    raise TimeoutError(f"{method} has no answer")
                read = os.read(self._answers, 1 << 16)
                if not read:
                    raise OSError(f"the browser has ended in {method}")
                self._buffer += read
                continue
            answer, self._buffer = json.loads(self._buffer[:end]), self._buffer[end + 1:]
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event):
        method, about = event.get("method", ""), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(about["exceptionDetails"]))
        elif method in ("Runtime.consoleAPICalled", "Log.entryAdded"):
            self.console.append(str(about))

    def js(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def until(self, expression, seconds=20):
        deadline = time.monotonic() + seconds
        while not self.js(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(expression)
            time.sleep(0.05)

    def key(self, key):
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def media(self, **features):
        self.call("Emulation.setEmulatedMedia", media=features.pop("media", ""),
                  features=[{"name": name.replace("_", "-"), "value": value} for name, value in features.items()])

    def picture(self, path, whole=False):
        about = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            about = {"captureBeyondViewport": True, "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", **about)["data"]))

    def pdf(self):
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])
