"""Other packages' doors: importing one of these modules registers attemper there. Each names its extra if the package
is missing.
"""
