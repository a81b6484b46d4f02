// Charts are read with the pointer, or with the slider under them: it is what keyboards and screen readers use.
for (const figure of document.querySelectorAll("figure[data-points]")) {
  const points = JSON.parse(figure.dataset.points)
  const [plot, tip, line, slider] = [".plot", ".tip", ".cursor", "input"].map(each => figure.querySelector(each))
  const show = place => {
    slider.value = place
    const [share, text] = points[place]
    const left = `${100 * share}%`
    slider.setAttribute("aria-valuetext", text)
    tip.textContent = text
    line.style.left = tip.style.left = left
    tip.style.transform = `translateX(-${left})`
    tip.hidden = line.hidden = false
  }
  const hide = () => { tip.hidden = line.hidden = true }
  const point = event => {
    const box = plot.getBoundingClientRect()
    const away = ([share]) => Math.abs(share - (event.clientX - box.left) / box.width)
    show(points.reduce((best, each, place) => away(each) < away(points[best]) ? place : best, 0))
  }
  plot.addEventListener("pointermove", point)
  plot.addEventListener("pointerdown", point)
  plot.addEventListener("pointerleave", hide)
  slider.addEventListener("input", () => show(+slider.value))
  slider.addEventListener("focus", () => show(+slider.value))
  slider.addEventListener("blur", hide)
  figure.addEventListener("keydown", event => event.key === "Escape" && hide())
  slider.max = points.length - 1
  slider.setAttribute("aria-valuetext", points[slider.value = 0][1])
  slider.hidden = false
}
