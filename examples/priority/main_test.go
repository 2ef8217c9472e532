package main

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

// The picture has two lines for each class, and the colours of dark pages.
func TestPicture(t *testing.T) {
	svg := picture(newTraffic().granted)
	d := xml.NewDecoder(strings.NewReader(svg))
	lines := 0
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if start, ok := token.(xml.StartElement); ok && start.Name.Local == "polyline" {
			lines++
		}
	}
	if lines != 2*len(classes) || !strings.Contains(svg, "prefers-color-scheme: dark") {
		t.Errorf("got %d lines, want two for each class, and colours for dark pages, in:\n%s", lines, svg)
	}
}
