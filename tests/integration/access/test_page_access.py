"""The page in a real browser, where the router has keys: given once, the key goes with all that follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.access.keys import Permission, new_key
from tests.browser import browsing, find_browser
from tests.integration.router.harness import running

pytestmark = [
    pytest.mark.skipif(
        find_browser() is None, reason="there is no chromium here (Debian: apt install chromium)"
    ),
    pytest.mark.full,
    pytest.mark.timeout(240),
]


async def test_the_key_that_a_browser_was_given_serves_the_whole_page(model_dir: Path) -> None:
    key, line = new_key("ops", [Permission.GENERATE, Permission.ADMIN])
    async with running(model_dir, http="127.0.0.1:0", api_keys={"keys": [line]}) as cluster:
        cluster.d.step_s = 0.02
        address = cluster.server.http_address
        # As from the browser's own question for a name and a password.
        async with browsing(f"http://me:{key}@{address}/pdserve/cluster") as page:
            await page.call("Page.navigate", url=f"http://{address}/")
            await page.until("document.querySelectorAll('.worker').length === 2")
            await page.until("document.getElementById('link').textContent === 'live'")
            await page.value("document.getElementById('max-tokens').value = 9")
            await page.value("document.getElementById('send').click()")
            await page.until("!document.getElementById('told').hidden")
            told = await page.value("document.getElementById('told').textContent")
            assert "then made 8 more tokens" in str(told)
            await page.until("document.querySelectorAll('#requests .row').length === 1")
            # The first page, which is no HTML, names no icon.
            assert [each for each in page.complaints if "favicon" not in each] == []
