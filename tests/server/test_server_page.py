# SPDX-License-Identifier: Apache-2.0
"""The chat page in a real browser: headless Chromium, driven by Debian's chromedriver."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import CHROMIUM
from scripted import CALL, TOOLS, writing
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from server_harness import Running, gated, serving
from waiting import PATIENCE, until

from lily.engine import Engine

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip
needs_browser = pytest.mark.skipif(not (BROWSER and DRIVER), reason=CHROMIUM)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """The page as somebody sees it who uses it."""

    def __init__(self, browser: webdriver.Chrome, server: Running) -> None:
        self.browser, self.server = browser, server
        browser.get(f"{server.url}/")
        browser.execute_script("localStorage.clear()")
        browser.get(f"{server.url}/")

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def wait(self, true: Callable[[], Any]) -> Any:
        return WebDriverWait(self.browser, PATIENCE, poll_frequency=0.02).until(lambda _: true())

    def say(self, text: str) -> None:
        self.find("#text").send_keys(text, Keys.ENTER)

    def done(self) -> None:
        """Waits until no reply is being written."""
        self.wait(lambda: self.find("#send").is_displayed())

    def texts(self, who: str) -> list[str]:
        return [article.text for article in self.all(f"article.{who}")]

    def settings(self, **fields: str) -> None:
        self.find("#open-settings").click()
        for name, value in fields.items():
            field = self.find(f"#settings [name={name}]")
            field.clear()
            field.send_keys(value)
        self.find("#settings button[type=submit]").click()


@pytest.fixture
def page(browser: webdriver.Chrome, server: Running) -> Page:
    return Page(browser, server)


def test_the_page_is_sent_with_rules_for_the_browser(server: Running) -> None:
    for path in ("/", "/page/page.js", "/page/page.css", "/page/icon.svg"):
        response = server.get(path)
        assert response.status_code == 200
        assert response.headers["content-security-policy"].startswith("default-src 'self';")
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.text.isascii()
    assert server.request("HEAD", "/").status_code == 200
    assert "<script>" not in server.get("/").text
    assert "innerHTML" not in server.get("/page/page.js").text


def test_a_key_is_not_needed_for_the_page_itself(engine: Engine) -> None:
    with serving(engine, key="right") as server:
        assert server.get("/").status_code == 200
        assert server.get("/v1/models").status_code == 401


@needs_browser
def test_a_reply_streams_with_its_thoughts_folded(page: Page, engine: Engine) -> None:
    with writing(engine, "Let me *think*.\n</think>\n\nIt is **blue**.\n\n```python\nprint('`x`')\n```\nSo `it` is."):
        page.say("What colour?")
        page.done()
    (reply,) = page.all("article.assistant")
    assert page.texts("user") == ["What colour?"]
    assert reply.find_element(By.CSS_SELECTOR, "summary").text == "Thoughts"
    assert not reply.find_element(By.CSS_SELECTOR, "details div").is_displayed()
    reply.find_element(By.CSS_SELECTOR, "summary").click()
    assert reply.find_element(By.CSS_SELECTOR, "details div").text == "Let me *think*."
    assert reply.find_element(By.CSS_SELECTOR, "b").text == "blue"
    assert reply.find_element(By.CSS_SELECTOR, "pre").text == "print('`x`')"
    assert [code.text for code in reply.find_elements(By.CSS_SELECTOR, "p code")] == ["it"]
    assert "tok/s" in page.find("#figures").text


@needs_browser
def test_what_the_model_writes_is_text_whatever_it_is(page: Page, engine: Engine) -> None:
    evil = "<script>document.title = 'gone'</script><img src=x onerror=\"document.title='gone'\">"
    with writing(engine, f"{evil}\n</think>\n\n{evil}\n\n```\n{evil}\n```"):
        page.say(evil)
        page.done()
    assert page.browser.title == "Lily"
    assert page.all("main img, main script") == []
    assert page.texts("user") == [evil]
    (reply,) = page.all("article.assistant")
    assert reply.find_element(By.CSS_SELECTOR, "p").text == evil
    assert reply.find_element(By.CSS_SELECTOR, "pre").text == evil
    assert reply.find_element(By.CSS_SELECTOR, "details div").get_attribute("textContent") == evil


@needs_browser
def test_stop_ends_the_request(page: Page) -> None:
    with gated() as gate:
        page.say("Hi")
        page.wait(lambda: page.find("#stop").is_displayed())
        until(lambda: page.server.app.requests == 1, "the request has come")
        page.find("#stop").click()
        page.done()
        gate.open()
    page.server.is_free()
    assert page.texts("assistant") == []
    assert not page.find("#problem").is_displayed()


@needs_browser
def test_a_new_chat_has_nothing_of_the_reply_that_it_ends(page: Page, engine: Engine) -> None:
    with writing(engine, "</think>\n\n" + "word " * 400):
        page.say("Go on for long.")
        page.wait(lambda: page.texts("assistant"))
        page.find("#new").click()
        page.server.is_free()
    page.done()
    with writing(engine, "</think>\n\nHello."):
        page.say("Hi")
        page.done()
    page.browser.refresh()
    assert (page.texts("user"), page.texts("assistant")) == (["Hi"], ["Hello."])


@needs_browser
def test_regenerate_and_edit(page: Page, engine: Engine) -> None:
    for text in ("First.", "Second."):
        with writing(engine, f"</think>\n\n{text}"):
            if text == "First.":
                page.say("Tell me.")
            else:
                page.find("#again").click()
            page.done()
        assert page.texts("assistant") == [text]
    page.find("#edit").click()
    assert page.find("#text").get_attribute("value") == "Tell me."
    assert page.all("article") == []
    page.browser.refresh()  # nothing was sent, and nothing is lost
    assert (page.texts("user"), page.texts("assistant")) == (["Tell me."], ["Second."])
    page.find("#edit").click()
    with writing(engine, "</think>\n\nThird."):
        page.say(" Now.")
        page.done()
    assert (page.texts("user"), page.texts("assistant")) == (["Tell me. Now."], ["Third."])
    page.browser.refresh()  # the conversation is still there
    assert (page.texts("user"), page.texts("assistant")) == (["Tell me. Now."], ["Third."])
    page.find("#new").click()
    assert page.all("article") == []


@needs_browser
def test_a_call_of_a_tool_is_shown_and_its_result_goes_back(page: Page, engine: Engine) -> None:
    page.settings(tools=json.dumps(TOOLS))
    with writing(engine, "</think>\n\nI look.\n\n" + CALL.format("the sky")):
        page.say("What colour is the sky?")
        page.done()
    assert page.find(".call b").text == "look"
    assert json.loads(page.find(".call pre").text) == {"at": "the sky", "times": 2}
    assert page.find("#text").get_attribute("placeholder") == "Result of look"
    with writing(engine, "</think>\n\nIt is blue."):
        page.say("blue")
        page.done()
    assert page.texts("tool") == ["blue"]
    assert page.texts("assistant")[-1] == "It is blue."


@needs_browser
def test_what_is_wrong_is_said(page: Page) -> None:
    page.browser.execute_script("document.getElementById('text').value = 'word '.repeat(3000)")
    page.find("#text").send_keys(Keys.ENTER)
    page.wait(lambda: "tokens" in page.find("#problem").text)
    page.done()
    assert page.texts("assistant") == []


@needs_browser
def test_the_page_works_with_a_key(browser: webdriver.Chrome, engine: Engine) -> None:
    with serving(engine, key="right") as server:
        page = Page(browser, server)
        page.say("Hi")
        page.wait(lambda: "key" in page.find("#problem").text)
        page.settings(key="right")
        with writing(engine, "</think>\n\nHello."):
            page.find("#again").click()
            page.wait(lambda: page.texts("assistant") == ["Hello."])
            page.done()


@needs_browser
def test_keys_are_enough(page: Page, engine: Engine) -> None:
    page.find("#text").send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two")
    assert page.find("#text").get_attribute("value") == "one\ntwo"
    with gated() as gate:
        page.find("#text").send_keys(Keys.ENTER)
        page.wait(lambda: page.find("#stop").is_displayed())
        page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
        page.done()
        gate.open()
    assert page.texts("user") == ["one\ntwo"]
    page.server.is_free()
    assert page.browser.switch_to.active_element.get_attribute("id") == "text"


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_on_a_phone_in_either_scheme(page: Page, engine: Engine, scheme: str, tmp_path: Path) -> None:
    tell = page.browser.execute_cdp_cmd
    tell("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    tell("Emulation.setDeviceMetricsOverride", {"width": 375, "height": 667, "deviceScaleFactor": 2, "mobile": True})
    try:
        with writing(engine, "Hm.\n</think>\n\n" + "long" * 60 + "\n\n```\n" + "x = 1; " * 40 + "\n```"):
            page.say("word" * 60)
            page.done()
        width = page.browser.execute_script("return document.documentElement.scrollWidth")
        back = page.browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        page.browser.save_screenshot(str(tmp_path / f"phone-{scheme}.png"))
    finally:
        tell("Emulation.clearDeviceMetricsOverride", {})
        tell("Emulation.setEmulatedMedia", {"features": []})
    assert width == 375
    red = int(back.removeprefix("rgb(").split(",")[0])
    assert (red > 128) == (scheme == "light")


@needs_browser
def test_nothing_is_asked_of_anybody_else(page: Page, engine: Engine) -> None:
    page.browser.get_log("performance")
    page.browser.get_log("browser")
    page.browser.refresh()
    with writing(engine, "</think>\n\n![x](http://example.com/x.png) http://example.com"):
        page.say("Hi")
        page.done()
    messages = [json.loads(entry["message"])["message"] for entry in page.browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert len(asked) >= 5
    assert all(url.startswith(f"{page.server.url}/") for url in asked)
    assert [entry for entry in page.browser.get_log("browser") if entry["level"] == "SEVERE"] == []
