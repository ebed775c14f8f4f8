#!/usr/bin/env node
console.log("from a folder")
