"""Words of the theme in Chinese: furo brings no translations, and some of its words cannot be translated at all."""

from __future__ import annotations

import gettext
import re

WORDS = {
    "On this page": "本页内容",
    "Next": "下一页",
    "Previous": "上一页",
    "Home": "首页",
    "Back to top": "回到顶部",
    "Skip to content": "跳到正文",
    "Languages": "语言",
    "Made with ": "生成工具：",
    '<a href="https://www.sphinx-doc.org/">Sphinx</a> and ': '<a href="https://www.sphinx-doc.org/">Sphinx</a>、',
}
FIXED = {
    "Toggle site navigation sidebar": "打开或关闭导航",
    "Toggle table of contents sidebar": "打开或关闭本页目录",
    "Toggle Light / Dark / Auto color theme": "切换浅色、深色或自动主题",
    "Contents": "目录",
    "Menu": "菜单",
    "Expand": "展开",
    "Light mode": "浅色",
    "Dark mode": "深色",
    "Auto light/dark, in light mode": "自动，当前为浅色",
    "Auto light/dark, in dark mode": "自动，当前为深色",
}
"""Words that furo's templates do not hand to gettext: labels of buttons and titles of pictures."""
LABEL = re.compile(r'(aria-label="|<title>)([^"<]+)')


class Chinese(gettext.NullTranslations):
    """What Sphinx's own catalogue does not have."""

    def gettext(self, message: str) -> str:
        return WORDS.get(message, message)


def in_chinese(html: str) -> str:
    """The body of a page with the labels that furo writes in English."""
    said = LABEL.sub(lambda label: label[1] + FIXED.get(label[2], label[2]), html)
    return said.replace(">@pradyunsg</a>'s", ">@pradyunsg</a> 的")
