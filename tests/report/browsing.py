"""Headless Chromium, and queries of a page in it."""

import base64
import json
import os
import shutil
import subprocess
import time

import pytest

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
DRIVER = shutil.which("chromedriver") or "/usr/bin/chromedriver"
MARKS = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (os.path.exists(CHROMIUM) and os.path.exists(DRIVER)),
        reason="chromium and chromedriver are not installed (Debian: apt install chromium chromium-driver)",
    ),
]


CUT = """[...document.querySelectorAll('.chart .annotation-text')].filter(title =>
  title.getBoundingClientRect().right > title.closest('.chart').getBoundingClientRect().right + 1
).map(title => title.textContent)"""


def start():
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))


def load(browser, path, width=1440, scheme="light", height=900):
    resize(browser, width, height)
    set_scheme(browser, scheme)
    browser.get(path.resolve().as_uri())


def resize(browser, width, height=900):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def set_scheme(browser, scheme):
    media = {"media": "", "features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


# Pixels between the margins: A4 is narrower than US Letter, which is shorter.
PAPER = (717, 979)
# Chromium shrinks a page that is wider than paper, at most to two thirds, and cuts what is still wider.
WIDEST = 1.5 * PAPER[0]


def show_paper(browser):
    """The page as it is laid out for a printer."""
    resize(browser, *PAPER)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")


def printed(browser):
    """The text of each printed page, as lines."""
    if not shutil.which("pdftotext"):
        pytest.skip("pdftotext is not installed (Debian: apt install poppler-utils)")
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
    text = subprocess.run(["pdftotext", "-layout", "-", "-"], input=pdf, capture_output=True, check=True).stdout
    return [[line.strip() for line in page.splitlines() if line.strip()] for page in text.decode().split("\f")[:-1]]


def until(true, seconds=10):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.05)
    return False


def ask(browser, expression, *arguments):
    """The value of an expression of JavaScript."""
    return browser.execute_script(f"return {expression}", *arguments)


def count(browser, selector):
    return ask(browser, "document.querySelectorAll(arguments[0]).length", selector)


def open_all(browser, marks="path"):
    """Open what is folded, and wait until all charts are drawn."""
    browser.execute_script("document.querySelectorAll('details').forEach(part => part.open = true)")
    wait_for_charts(browser, marks)


def wait_for_charts(browser, marks="path"):
    """Scrolls through the page, which draws what is near, and back."""
    boxes = "[...document.querySelectorAll('.chart')].filter(box => box.checkVisibility())"
    missing = f"{boxes}.find(box => box.querySelectorAll(arguments[0]).length <= 3)"
    assert until(lambda: ask(browser, f"({missing}?.scrollIntoView(), {missing} === undefined)", marks))
    browser.execute_script("scrollTo(0, 0)")


def check(browser, width):
    """Nothing is wider than the window, or a title than its chart; nothing failed, or came from elsewhere."""
    assert ask(browser, CUT) == []
    assert ask(browser, "document.documentElement.scrollWidth") <= width
    assert errors(browser) == []
    assert requested(browser) == []


def errors(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def requested(browser):
    """The addresses that the page requested, except its own and embedded data."""
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith(("file:", "data:", "blob:"))]
