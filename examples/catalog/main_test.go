package main

import (
	"encoding/xml"
	"io"
	"strings"
	"testing"
	"time"
)

func TestPicture(t *testing.T) {
	svg := picture(map[string][]int{"acme": {10, 10, 50}, "initech": {10}}, time.Second)
	d := xml.NewDecoder(strings.NewReader(svg))
	lines := 0
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if start, ok := token.(xml.StartElement); ok && start.Name.Local == "polyline" {
			lines++
		}
	}
	if lines != 2 {
		t.Errorf("got %d lines, want one for each customer", lines)
	}
}
