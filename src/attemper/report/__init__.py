"""Readings and runs as pages, HTML files that open offline, and as tables in the terminal. Never imports torch.

``page`` puts one together from ``templates`` and ``assets`` (ours) and ``vendor`` (ECharts); ``document`` is the data
it carries, ``headline`` the sentence at its top, ``key_figures`` what is seen without scripts.
``comparison``, ``check``, ``explanation``, ``patterns``, ``live``, ``history`` and ``runs`` are other pages,
``overview`` is a run at a glance, ``scan_table`` and ``run_table`` are for the terminal.
"""
