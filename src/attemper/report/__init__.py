"""A reading as a page: one HTML file that opens offline, for people. Never imports torch.

``page`` puts it together from ``templates`` and ``assets`` (ours) and ``vendor`` (ECharts); ``document`` is the data
it carries, ``headline`` the sentence at its top, ``key_figures`` what is seen without scripts.
``comparison`` is the page of two scans.
"""
