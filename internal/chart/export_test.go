package chart

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// Check returns an error if a picture has no title or no colours for dark pages, or a text that is
// stretched or may end beyond the picture: another font than the layout's may be an eighth wider.
func Check(picture []byte) error {
	if !bytes.Contains(picture, []byte("prefers-color-scheme: dark")) || !bytes.Contains(picture, []byte("<title>")) {
		return errors.New("no title, or no colours for dark pages")
	}
	attribute := func(e xml.StartElement, name, otherwise string) string {
		for _, a := range e.Attr {
			if a.Name.Local == name {
				return a.Value
			}
		}
		return otherwise
	}
	number := func(e xml.StartElement, name, otherwise string) float64 {
		v, _ := strconv.ParseFloat(attribute(e, name, otherwise), 64)
		return v
	}
	var text xml.StartElement
	wide, size := 0.0, "0"
	for d := xml.NewDecoder(bytes.NewReader(picture)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		switch token := token.(type) {
		case xml.StartElement:
			text = token.Copy()
			if text.Name.Local == "svg" {
				wide, size = number(text, "width", "0"), attribute(text, "font-size", "0")
			}
		case xml.CharData:
			if text.Name.Local != "text" {
				continue
			}
			length := textWidth(string(token)) * number(text, "font-size", size) * 1.125
			from := number(text, "x", "0")
			switch attribute(text, "text-anchor", "start") {
			case "end":
				from -= length
			case "middle":
				from -= length / 2
			}
			if from < 0 || from+length > wide || attribute(text, "textLength", "") != "" {
				return fmt.Errorf("%q is from %.0f to %.0f of %.0f, or stretched", token, from, from+length, wide)
			}
			text.Name.Local = ""
		case xml.EndElement:
			text.Name.Local = ""
		}
	}
}
