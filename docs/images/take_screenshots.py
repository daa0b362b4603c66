"""The pictures of pages in the docs: `make pictures`, after `make demo`. Chromium draws them, in few colours."""

import base64
import io
import shutil
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
COLOURS = 128
MARGIN = 12
HEADING, CHART = "document.querySelector('h1')", "document.querySelector('#overview-chart')"


def start() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = shutil.which("chromedriver") or "/usr/bin/chromedriver"
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def take(browser: webdriver.Chrome, page: Path, name: str, width: int, start: str, end: str, scheme="light") -> None:
    """The page from the start of one element to the end of another, given by JavaScript."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page.resolve().as_uri())
    time.sleep(3)  # charts are drawn when they come into view
    top = browser.execute_script(f"return {start}.getBoundingClientRect().top") - MARGIN
    bottom = browser.execute_script(f"return {end}.getBoundingClientRect().bottom") + MARGIN
    clip = {"x": 0, "y": top, "width": width, "height": bottom - top, "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(HERE / name, optimize=True)


def main() -> None:
    demo, results = ROOT / "runs" / "demo", ROOT / "runs" / "results.html"
    if not any((demo / "runs").glob("depo-*/result.json")):
        sys.exit("runs/demo has no finished runs on Depo: make demo trains them")
    canonlm = [sys.executable, "-m", "canonlm"]
    subprocess.run([*canonlm, "report", str(demo)], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*canonlm, "results", "--html", str(results)], check=True)
    browser = start()
    depo = "[...document.querySelectorAll('section')].find(each => /^depo/i.test(each.innerText))"
    for name, width, scheme in (("demo.png", 1000, "light"), ("demo-phone.png", 390, "dark")):
        take(browser, demo / "report.html", name, width, depo, f"{depo}.querySelector('figcaption')", scheme)
    take(browser, results, "results.png", 1280, HEADING, CHART)
    browser.quit()


if __name__ == "__main__":
    main()
