// What tests/project/test_site.py asks of a page as it is shown: texts that are hard to read, what is too wide, pictures without alt.
(() => {
  // The colour that a style names, as [r, g, b, a]; a canvas knows every notation.
  const pen = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d", {willReadFrequently: true})
  const known = new Map()
  const colour = text => {
    if (!known.has(text)) {
      pen.clearRect(0, 0, 1, 1)
      pen.fillStyle = text
      pen.fillRect(0, 0, 1, 1)
      const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data
      known.set(text, [r, g, b, a / 255])
    }
    return known.get(text)
  }
  const over = ([r, g, b, a], under) => [r, g, b].map((c, i) => c * a + under[i] * (1 - a)).concat(1)
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    return 0.2126 * x + 0.7152 * y + 0.0722 * z
  }
  const ratio = (a, b) => {
    const [dark, bright] = [light(a), light(b)].sort((x, y) => x - y)
    return (bright + 0.05) / (dark + 0.05)
  }
  // What is behind a text: of a picture, the last shape drawn before it that holds its middle; then the element and those around it.
  const behind = element => {
    const layers = []
    const picture = element.closest("svg")
    if (picture) {
      const at = element.getBoundingClientRect(), x = at.x + at.width / 2, y = at.y + at.height / 2
      for (const shape of picture.querySelectorAll("rect")) {
        const box = shape.getBoundingClientRect()
        const before = shape.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_FOLLOWING
        if (before && box.x <= x && x <= box.right && box.y <= y && y <= box.bottom) layers.unshift(colour(getComputedStyle(shape).fill))
      }
    }
    for (let each = element; each; each = each.parentElement) layers.push(colour(getComputedStyle(each).backgroundColor))
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255, 1])
  }

  const faint = new Map()
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  while (words.nextNode()) {
    const element = words.currentNode.parentElement
    if (!words.currentNode.data.trim() || element.closest("script, style, noscript, .headerlink, [hidden]")) continue
    if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue
    const box = element.getBoundingClientRect()
    if (box.width < 2 || box.height < 2) continue
    const style = getComputedStyle(element), ground = behind(element)
    const text = over(colour(element.closest("svg") ? style.fill : style.color), ground)
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700)
    const found = ratio(text, ground)
    if (found < (large ? 3 : 4.5)) {
      const key = `${element.tagName.toLowerCase()}.${element.getAttribute("class") || ""} in ${element.parentElement.tagName.toLowerCase()}.${element.parentElement.getAttribute("class") || ""}`
      if (!faint.has(key)) faint.set(key, `${key}: ${found.toFixed(2)}, "${words.currentNode.data.trim().slice(0, 40)}"`)
    }
  }

  // What is wider than the window, and not in something that scrolls or cuts by itself.
  const wide = []
  if (document.documentElement.scrollWidth > innerWidth) {
    for (const element of document.querySelectorAll("body *")) {
      const box = element.getBoundingClientRect()
      if (box.width && box.right > innerWidth + 1) wide.push(`${element.tagName.toLowerCase()}.${element.getAttribute("class") || ""} to ${Math.round(box.right)}`)
    }
    wide.unshift(`the page is ${document.documentElement.scrollWidth} wide in ${innerWidth}`)
  }

  const images = [...document.images].filter(image => !(image.complete && image.naturalWidth)).map(image => image.src)
  const nameless = [...document.querySelectorAll("article img, article svg[role=img]")]
    .filter(picture => !(picture.getAttribute("alt") || picture.getAttribute("aria-label") || "").trim())
    .map(picture => picture.outerHTML.slice(0, 80))
  return {faint: [...faint.values()], wide: wide.slice(0, 6), images, nameless}
})()
