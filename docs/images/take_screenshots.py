"""The pictures of pages in the docs: `make pictures`, after `make demo` and `make docs`. Chromium draws them, in few
colours."""

import base64
import io
import shutil
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from selenium import webdriver

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
COLOURS = 128
MARGIN = 12
CAPTION = "document.querySelectorAll('figcaption')[1]"
HEADING, CHART = "document.querySelector('h1')", "document.querySelector('#overview-chart')"


def start() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
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
    browser.execute_script("localStorage.clear(); location.reload()")  # the site remembers its colour scheme
    time.sleep(1)
    browser.execute_script(f"{end}.scrollIntoView()")  # charts are drawn when they come into view
    time.sleep(3)
    browser.execute_script("scrollTo(0, 0)")
    top = max(0, browser.execute_script(f"return {start}.getBoundingClientRect().top") - MARGIN)
    bottom = browser.execute_script(f"return {end}.getBoundingClientRect().bottom") + MARGIN
    clip = {"x": 0, "y": top, "width": width, "height": bottom - top, "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    shown = PngInfo()  # the page's first words, by which a test sees whether the picture is of today's page
    shown.add_itxt("page", browser.execute_script("return document.body.innerText.slice(0, 500)"), zip=True)
    image = image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(HERE / name, optimize=True, pnginfo=shown)


def main() -> None:
    demo, results, claims = ROOT / "runs/demo", ROOT / "runs/results.html", ROOT / "runs/claims.html"
    site = ROOT / "build/site/playground.html"
    if not any((demo / "runs").glob("depo-*/result.json")):
        sys.exit("runs/demo has no finished runs on Depo: make demo trains them")
    if not site.exists():
        sys.exit("build/site has no pages: make docs builds them")
    canonlm = [sys.executable, "-m", "canonlm"]
    subprocess.run([*canonlm, "report", str(demo)], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*canonlm, "results", "--html", str(results)], check=True)
    subprocess.run([*canonlm, "claims", "--out", str(claims)], check=True)
    subprocess.run(
        [*canonlm, "replicate", "predict", "--out", str(ROOT / "runs")], check=True, stdout=subprocess.DEVNULL
    )
    depo = "[...document.querySelectorAll('section')].find(each => /^depo/i.test(each.innerText))"
    third_row, second_heading = "document.querySelectorAll('tbody tr')[2]", "document.querySelectorAll('article h2')[1]"
    pages = [
        ("demo", demo / "report.html", depo, f"{depo}.querySelector('figcaption')", 1000),
        ("results", results, HEADING, CHART, 1280),
        ("claims", claims, HEADING, third_row, 1440),
        ("site", site, "document.body", second_heading, 1440),
        ("prediction", ROOT / "runs/prediction.html", "document.querySelector('figure')", CAPTION, 1280),
    ]
    browser = start()
    for name, page, first, last, width in pages:
        take(browser, page, f"{name}.png", width, first, last)
        take(browser, page, f"{name}-phone.png", 390, first, last, "dark")
    browser.quit()


if __name__ == "__main__":
    main()
